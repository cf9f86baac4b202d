"""The settings of `warmroute up`."""

from typing import Annotated

import msgspec
from msgspec import Meta


class UpConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All settings of a stack on one machine; processes that it starts get theirs from here."""

    model: Annotated[str, Meta(description="model of every worker: smollm2, a .gguf file, or a checkpoint folder")] = (
        "smollm2"
    )
    workers: Annotated[int, Meta(description="worker processes", ge=1, le=64)] = 2
    host: Annotated[str, Meta(description="address that the router listens on")] = "127.0.0.1"
    port: Annotated[
        int, Meta(description="port of the router; a free one is used when it is taken", ge=0, le=65535)
    ] = 8000
    nats_port: Annotated[
        int, Meta(description="port of the broker; a free one is used when it is taken", ge=0, le=65535)
    ] = 4222
    policy: Annotated[str, Meta(description="the router's policy, see `warmroute router --help`")] = "warm"
    cache_gb: Annotated[float, Meta(description="size of each worker's KV cache, GB", gt=0)] = 0.5
    threads: Annotated[
        int, Meta(description="CPU threads of each worker; 0 = the cores shared out over the workers", ge=0)
    ] = 0
    proof: Annotated[bool, Meta(description="ask the built-in questions when everything is ready")] = True
    once: Annotated[bool, Meta(description="end after the proof, with status 0 if it succeeded")] = False
    json: Annotated[bool, Meta(description="print the proof as one JSON object on the last line")] = False
    start_timeout_s: Annotated[float, Meta(description="longest wait until everything is ready", gt=0)] = 300.0
    stop_grace_s: Annotated[float, Meta(description="how long a process may take to end before it is killed", gt=0)] = (
        10.0
    )
    keep_logs: Annotated[str, Meta(description="folder to keep the processes' logs in; empty = a temporary one")] = ""
