"""What travels on a real bus is, after every engine step, exactly what the allocator holds."""

import asyncio
import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

from context import DynamicInferenceContext
from kvevents.bus import Incoming, NatsBus
from kvevents.messages import Removed, Stored, decode_events, decode_message, unpack_hashes
from kvevents.publisher import EventPublisher
from kvevents.subjects import EVENTS_ALL
from kvevents.types import Beat, SourceId
from kvevents.worker_plane import WorkerPlane
from serving.model_files import resolve_model
from serving.tokenizer import load_tokenizer
from warmroute.up.broker import LogReader, command
from worker.config import WorkerConfig
from worker.engine import EngineCore, GenerationRequest, Limits, Output
from worker.loading import build_context
from worker.models import Model, load_model
from worker.models.checkpoint import expected_shapes
from worker.models.folder_checkpoint import FolderCheckpoint
from worker.sampling import SamplingSettings

from .processes import Running

BLOCK = 8
BLOCKS = 40
"""Few enough that prompts push each other out."""
LONGEST = 160


def narrow_model(folder: Path, vocabulary: int) -> Model:
    """Two narrow random layers; how blocks are kept does not depend on what they hold."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocabulary,
        "max_position_embeddings": LONGEST, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"placeholder": torch.zeros(1)}, folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(FolderCheckpoint(folder, torch.float32).config)
    save_file(
        {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    return load_model(folder)


class Heard:
    """The set of engine hashes that the bus's messages add up to."""

    def __init__(self) -> None:
        self.hashes: set[int] = set()
        self.seq = 0
        self.stored = self.removed = 0
        self._arrived = asyncio.Event()

    def __call__(self, incoming: Incoming) -> None:
        message = decode_message(incoming.data)
        assert message.seq == self.seq + 1
        for event in decode_events(message):
            if isinstance(event, Stored):
                self.hashes.update(unpack_hashes(event.engine_hashes).tolist())
                self.stored += 1
            elif isinstance(event, Removed):
                self.hashes.difference_update(unpack_hashes(event.engine_hashes).tolist())
                self.removed += 1
            else:
                self.hashes.clear()
        assert len(self.hashes) == message.blocks
        self.seq = message.seq
        self._arrived.set()

    async def up_to(self, seq: int) -> None:
        """Wait for the message `seq`."""
        async with asyncio.timeout(10):
            while self.seq < seq:
                self._arrived.clear()
                await self._arrived.wait()


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Prompts of which many begin alike."""
    rng = random.Random(7)
    beginnings = [[rng.randrange(vocabulary) for _ in range(rng.randrange(16, 70))] for _ in range(4)]
    return [
        rng.choice(beginnings) + [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 60))] for _ in range(count)
    ]


def held(context: DynamicInferenceContext) -> set[int]:
    """The engine hashes that the allocator would find."""
    return {block_hash % 2**64 for block_hash in context.kv_block_allocator.kv_hash_to_block_id}


async def test_the_bus_equals_the_allocator_after_every_step(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    model = narrow_model(tmp_path, tokenizer.vocab_size)
    block_bytes = 2 * 2 * BLOCK * 2 * 8 * 4
    context = build_context(
        WorkerConfig(
            block_size_tokens=BLOCK, cache_gb=BLOCKS * block_bytes / 2**30, max_requests=4, max_tokens=64,
            max_sequence_length=LONGEST,
        ),
        model,
    )  # fmt: skip
    publisher = EventPublisher(SourceId("w", 0), "narrow", BLOCK)
    context.dynamo_helper.add_kv_event_listener(publisher.listener)
    core = EngineCore(model, context, tokenizer, on_step_end=publisher.end_step)
    broker = Running(command(0), tmp_path / "broker.log", parse=LogReader())
    try:
        buses = [await NatsBus.connect(broker.wait_ready()) for _ in range(2)]
        heard = Heard()
        await buses[1].subscribe(EVENTS_ALL, heard)
        plane = WorkerPlane(buses[0], [publisher], _beat, interval_s=60)
        await plane.start()
        await _steps(core, publisher, heard, context, prompts(60, model.config.vocab))
        assert heard.stored > 30
        assert heard.removed > 10
        await plane.stop()
        for bus in buses:
            await bus.close()
    finally:
        broker.stop()


async def _steps(
    core: EngineCore,
    publisher: EventPublisher,
    heard: Heard,
    context: DynamicInferenceContext,
    waiting: list[list[int]],
) -> None:
    """Run all prompts, a few at a time, comparing after each step."""
    rng = random.Random(11)
    outputs: list[Output] = []
    while core.has_work or waiting:
        if waiting and rng.random() < 0.4:
            limits = Limits(max_tokens=rng.randrange(1, 24))
            request = GenerationRequest(waiting.pop(), limits, SamplingSettings(temperature=0.0))
            core.add(core.prepare(request, outputs.append))
        core.step()
        await heard.up_to(publisher.state().seq)
        assert heard.hashes == held(context)
        context.kv_block_allocator.check_integrity()
    assert all(output.error is None for output in outputs)


def _beat() -> Beat:
    return Beat(
        version=1, worker="w", model="narrow", address="", block_size=BLOCK, capacity_blocks=BLOCKS,
        max_sequence_length=LONGEST, tokenizer="", state="ready", sent_at=0.0, sources=[], features=[],
    )  # fmt: skip
