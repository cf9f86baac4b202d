"""Plain against packed matrix products at the shapes of SmolLM2-135M, by number of rows.

python bench/linear.py --threads 2
"""

import argparse
import time
from collections.abc import Callable

import torch

from worker.models.linear import PackedLinear, PlainLinear

_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""(out, in) of query-key-value, attention output, gate-up and down."""
_LAYERS = 30
"""As many as the model has, so that weights come from memory and not from a cache."""


def _milliseconds(run: Callable[[], None], rounds: int) -> float:
    run()
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best * 1e3


def main() -> None:
    """Print milliseconds for all products of one forward pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    weights = [[torch.randn(shape, generator=generator) for shape in _SHAPES] for _ in range(_LAYERS)]
    plain = [[PlainLinear(weight, None) for weight in layer] for layer in weights]
    packed = [[PackedLinear(weight, None) for weight in layer] for layer in weights]
    print(f"torch {torch.__version__}, {arguments.threads} threads, best of several")
    print("rows   plain ms  packed ms  plain/packed")
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 160, 192, 256, 512, 1024):
        inputs = [torch.randn(rows, shape[1], generator=generator) for shape in _SHAPES]

        def run(layers: list[list[PlainLinear]] | list[list[PackedLinear]], given: list[torch.Tensor] = inputs) -> None:
            for layer in layers:
                for product, values in zip(layer, given, strict=True):
                    product(values)

        with torch.inference_mode():
            rounds = 12 if rows <= 64 else 4
            slow, fast = _milliseconds(lambda: run(plain), rounds), _milliseconds(lambda: run(packed), rounds)
        print(f"{rows:4} {slow:10.1f} {fast:10.1f} {slow / fast:13.2f}", flush=True)


if __name__ == "__main__":
    main()
