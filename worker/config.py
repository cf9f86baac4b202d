"""The worker's settings: one typed object, filled from flags, environment, file and defaults by `serving.config`."""

import os
import socket
from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class WorkerConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All settings of one worker process; times are seconds, lengths are tokens."""

    id: Annotated[str, Meta(description="name of this worker, unique in the fleet; empty = host name and process")] = ""
    model: Annotated[str, Meta(description="smollm2, a .gguf file, or a checkpoint folder")] = "smollm2"
    served_name: Annotated[str, Meta(description="model name that clients use; empty = the model's own")] = ""
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(description="port to listen on; 0 = a free one", ge=0, le=65535)] = 0
    advertised_address: Annotated[
        str, Meta(description="URL under which routers reach this worker; empty = http://host:port")
    ] = ""
    nats: Annotated[str, Meta(description="NATS URL of the event plane; empty = none")] = ""
    device: Annotated[str, Meta(description="torch device: cpu, cuda, cuda:1")] = "cpu"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], Meta(description="type of weights, activations and KV cache")
    ] = "float32"
    threads: Annotated[int, Meta(description="CPU threads for the model; 0 = all cores", ge=0)] = 0
    block_size_tokens: Annotated[int, Meta(description="tokens of a KV block", ge=1, le=1024)] = 16
    cache_gb: Annotated[float, Meta(description="size of the KV cache, GB", gt=0)] = 0.5
    paused_cache_gb: Annotated[float, Meta(description="part of the cache that paused requests may keep, GB", ge=0)] = (
        0.0
    )
    max_requests: Annotated[int, Meta(description="requests that run at once", ge=1)] = 64
    max_tokens: Annotated[
        int, Meta(description="tokens of one step; longer prompts are computed in chunks of this", ge=4)
    ] = 1024
    max_sequence_length: Annotated[
        int, Meta(description="longest prompt and answer together; 0 = the model's own", ge=0)
    ] = 0
    max_waiting: Annotated[int, Meta(description="requests that may wait; more are refused with 503", ge=1)] = 512
    prefix_caching_eviction_policy: Annotated[
        Literal["lru", "ref_zero"],
        Meta(description="lru keeps finished prompts until their place is needed; ref_zero keeps none"),
    ] = "lru"
    advertise_generated_blocks: Annotated[
        bool, Meta(description="cache and advertise blocks of generated tokens, for the next turn")
    ] = True
    dp_rank: Annotated[int, Meta(description="data-parallel rank that events carry", ge=0)] = 0
    beat_interval_s: Annotated[float, Meta(description="time between heartbeats", gt=0)] = 1.0
    drain_timeout_s: Annotated[float, Meta(description="longest wait for running requests at the end", ge=0)] = 30.0
    max_body_mb: Annotated[int, Meta(description="largest request body, MB", ge=1)] = 16
    debug: Annotated[bool, Meta(description="check the cache's integrity whenever the engine is idle")] = False
    log_level: Annotated[str, Meta(description="debug, info, warning or error")] = "info"
    log_json: Annotated[bool, Meta(description="one JSON object a log line")] = False

    def __post_init__(self) -> None:
        if self.max_tokens < self.max_requests + 2:
            raise ValueError(
                f"max_tokens ({self.max_tokens}) must be at least max_requests + 2 ({self.max_requests + 2}), "
                "or a full batch would leave no room to begin a prompt"
            )

    @property
    def worker_id(self) -> str:
        """`id`, or host name and process number."""
        return self.id or f"{socket.gethostname()}-{os.getpid()}"
