"""Products with few rows on one GPU: tile sizes compared in a graph of many products whose weights are not in the
cache.

python benchmarks/few_rows_gpu.py [--rows 1,64] [--shapes 1B,8B]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

import torch
from torch import Tensor

from plaudit.algo.tokens import product_kernel
from plaudit.algo.tokens.product_kernel import FEW, SOME, Tiles
from plaudit.algo.tokens.products import few_rows_agree
from plaudit.core import kernels

WORKS = {  # inner, columns of each weight, gated
    "1B": {"qkv": (2048, (2048, 512, 512), False), "o": (2048, (2048,), False), "gate, up": (2048, (8192, 8192), True),
           "down": (8192, (2048,), False)},
    "8B": {"qkv": (4096, (4096, 1024, 1024), False), "o": (4096, (4096,), False),
           "gate, up": (4096, (14336, 14336), True), "down": (14336, (4096,), False)},
    "135M": {"qkv": (576, (576, 192, 192), False), "gate, up": (576, (1536, 1536), True),
             "down": (1536, (576,), False)},
}  # fmt: skip
BYTES = 1 << 30  # bytes of weights that a graph reads


def timed(call: Callable[[int], None], count: int) -> float:
    """Microseconds of one of `count` calls in a graph."""
    for number in range(2):
        call(number)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            call(number)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(3):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / 3 / count


def candidates(rows: int, gated: bool) -> list[Tiles]:
    heights = (16, FEW) if rows <= 16 else (FEW,) if rows <= FEW else (FEW, 2 * FEW)
    found = []
    for height, strip, piece, warps, limit in product(heights, (16, 32, 64, 128), (64, 128, 256), (2, 4, 8), (96, 220)):
        stages = min(7, limit * 1024 // ((height + strip * (1 + gated)) * piece * 2))
        if stages >= 2 and (warps == 2) <= (height == 16) and (warps == 8) <= (height > 64):
            found.append(Tiles(strip, height, piece, warps, stages))
    return list(dict.fromkeys(found))


def compile_one(tiles: Tiles, gated: bool) -> None:
    """Compiles one kernel into Triton's cache on disk."""
    x, first, second = (torch.zeros(n, 2048, device="cuda", dtype=torch.bfloat16) for n in (1, 512, 512))
    outs = [torch.empty(1, 512, device="cuda", dtype=x.dtype) for _ in range(2 - gated)]
    product_kernel._launch(x, [first, second], None, outs, gated, tiles)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,64")
    parser.add_argument("--shapes", default="1B,8B")
    parser.add_argument("--parts", default="qkv;o;gate, up;down")
    options = parser.parse_args()
    wanted = {(tiles, gated) for rows in map(int, options.rows.split(",")) for gated in (False, True)
              for tiles in candidates(rows, gated)}  # fmt: skip
    with ProcessPoolExecutor(12, get_context("spawn")) as pool:
        for future in [pool.submit(compile_one, *each) for each in wanted]:
            future.exception()  # one that does not compile is reported where it would be timed
    for shape, rows in product(options.shapes.split(","), map(int, options.rows.split(","))):
        for name, (inner, columns, gated) in WORKS[shape].items():
            if name not in options.parts.split(";"):
                continue
            size = sum(columns) * inner * 2
            count = max(8, BYTES // size)
            sets = [[torch.randn(n, inner, device="cuda", dtype=torch.bfloat16) for n in columns] for _ in range(count)]
            x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
            outs = [torch.empty(rows, n, device="cuda", dtype=x.dtype) for n in (columns[:1] if gated else columns)]
            agree = rows > FEW or few_rows_agree(sets[0], None, kernels.silu_mul if gated else None)
            padded = torch.zeros(2 * SOME, inner, device="cuda", dtype=torch.bfloat16)

            def library(number: int, sets: list[list[Tensor]] = sets, x: Tensor = x, gated: bool = gated) -> None:
                made = [x @ weight.T for weight in sets[number]]
                if gated:
                    kernels.silu_mul(*made)

            def more(number: int, sets: list[list[Tensor]] = sets, padded: Tensor = padded) -> None:
                padded @ sets[number][0].T

            print(f"{shape}, {rows} rows, {name}: library {timed(library, count):.1f} µs, of {2 * SOME} rows "
                  f"{timed(more, count):.1f}, "
                  f"at 4.3 TB/s {size / 4.3e6:.1f}; bits of many: {agree}")  # fmt: skip
            found = []
            for tiles in candidates(rows, gated):

                def ours(number: int, tiles: Tiles = tiles, sets: list[list[Tensor]] = sets, x: Tensor = x,
                         outs: list[Tensor] = outs, gated: bool = gated) -> None:  # fmt: skip
                    product_kernel._launch(x, sets[number], None, outs, gated, tiles)

                try:
                    found.append((timed(ours, count), tiles))
                except Exception as error:  # not enough shared memory
                    print("   ", tiles, str(error)[:60])
            found.sort(key=lambda each: each[0])
            for time, tiles in [*found[:6], *[each for each in found if each[1] == product_kernel.tiles_for(
                    rows, sum(out.shape[1] for out in outs), gated, product_kernel._shared(x.device))]]:  # fmt: skip
                print(f"    {time:6.1f} µs  {tiles}")


if __name__ == "__main__":
    main()
