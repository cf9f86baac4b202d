"""The router's settings: one typed object, filled from flags, environment, file and defaults by
`serving.config`.
"""

from typing import Annotated

import msgspec
from msgspec import Meta


class RouterConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All settings of one router process; times are seconds."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(description="port to listen on; 0 = a free one", ge=0, le=65535)] = 8000
    nats: Annotated[str, Meta(description="NATS URL of the event plane")] = "nats://127.0.0.1:4222"
    policy: Annotated[
        str,
        Meta(
            description="how a worker is chosen: warm, round-robin, random, least-loaded, power-of-two,"
            " overlap-only, session-hash, or an installed policy"
        ),
    ] = "warm"
    tokenizers: Annotated[
        dict[str, str],
        Meta(description="served model name -> tokenizer file or folder; absent = ask a worker's /tokenize"),
    ] = {}
    lease_s: Annotated[float, Meta(description="a worker silent for this long gets no new prompts", gt=0)] = 3.0
    grace_s: Annotated[float, Meta(description="a worker silent for this long is forgotten", gt=0)] = 30.0
    connect_timeout_s: Annotated[float, Meta(description="longest wait to connect to a worker", gt=0)] = 2.0
    request_timeout_s: Annotated[
        float, Meta(description="longest wait for the first byte of an answer, queueing included", gt=0)
    ] = 600.0
    idle_timeout_s: Annotated[float, Meta(description="longest pause between two parts of an answer", gt=0)] = 120.0
    max_retries: Annotated[
        int, Meta(description="other workers tried while nothing has been sent to the client", ge=0)
    ] = 3
    predicted_ttl_s: Annotated[
        float, Meta(description="how long a placed prompt counts as cached before its events arrive", gt=0)
    ] = 5.0
    max_body_mb: Annotated[int, Meta(description="largest request body, MB", ge=1)] = 64
    drain_s: Annotated[float, Meta(description="longest wait for running requests at shutdown", ge=0)] = 30.0
    receipts: Annotated[int, Meta(description="decisions kept for /debug/decisions", ge=0)] = 1000
    seed: Annotated[int | None, Meta(description="seed of random choices; absent = different every run")] = None
    log_level: Annotated[str, Meta(description="debug, info, warning or error")] = "info"
    log_json: Annotated[bool, Meta(description="one JSON object a log line")] = False
