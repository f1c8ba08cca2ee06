"""What hpctrain adds to a training step of raw torch.amp, in float32, bfloat16 and float16.

One process, on a GPU if there is one. `python -m benchmarks.precision --help`; docs/benchmarks.md
says what is measured and how.
"""

from __future__ import annotations

import argparse
import sys

from hpctrain.bench import BenchPlan, Case, Variant, command, run_plan
from hpctrain.errors import ConfigError

__all__ = ["COMPARISONS", "VARIANTS", "main"]

_PRECISIONS = ("fp32", "bf16", "fp16")
VARIANTS = (
    *(Variant(name=f"amp-{p}", launch="one") for p in _PRECISIONS),
    Variant(name="amp-fp16-again", launch="one"),
    *(Variant(name=f"hpctrain-{p}", launch="one") for p in _PRECISIONS),
)
"""All in one process, which neither communicates nor has threads. `amp-fp32` is plain torch;
`amp-fp16-again` shows the noise of the method."""

COMPARISONS = (
    *((variant.name, "amp-fp32") for variant in VARIANTS[1:]),
    *((f"hpctrain-{p}", f"amp-{p}") for p in _PRECISIONS[1:]),
    ("amp-fp16-again", "amp-fp16"),
    *((f"hpctrain-{p}", "hpctrain-fp32") for p in _PRECISIONS[1:]),
)
_WORKLOADS = ("transformer", "resnet")
_WARMUP = 3


def main() -> int:
    """Measure, or be the process that is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision", description=__doc__)
    command.add_arguments(parser, blocks=20)
    parser.set_defaults(ranks=1)
    parser.add_argument(
        "--steps", type=int, default=30, metavar="S", help="steps in a block (default: 30)"
    )
    parser.add_argument(
        "--workloads", metavar="A,B", help=f"from {', '.join(_WORKLOADS)} (default: all)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)"
    )
    args = parser.parse_args()
    if args.worker:
        from benchmarks.precision_subjects import make_maker
        from hpctrain.bench import serve

        serve(args.worker, args.variants.split(","), make_maker(), device="auto")
        return 0
    if args.ranks != 1:
        raise ConfigError(f"--ranks {args.ranks}: raw torch.amp is one process; use --ranks 1")
    device, name = _find_device(args.device)
    names = command.choose(
        "variant",
        args.variants or ",".join(variant.name for variant in VARIANTS),
        [variant.name for variant in VARIANTS],
    )
    workloads = command.choose("workload", args.workloads or ",".join(_WORKLOADS), _WORKLOADS)
    steps = 2 if args.quick else args.steps
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    plan = BenchPlan(
        name="precision",
        module="benchmarks.precision",
        cases=[Case(name=name, warmup=_WARMUP, repeats=steps) for name in workloads],
        variants=[
            Variant(name=variant.name, launch=variant.launch, environ=hidden)
            for variant in VARIANTS
            if variant.name in names
        ],
        comparisons=COMPARISONS,
        rules=command.rules_of(args),
        settings={"steps": steps, "warmup": _WARMUP, "device": name, "optimizer": "AdamW, fused"},
    )
    return command.report(args, run_plan(plan, args.json))


def _find_device(asked: str) -> tuple[str, str]:
    """The device to measure on, and what it calls itself.

    Raises:
        ConfigError: there is no GPU.
    """
    import torch

    if asked != "cpu" and torch.cuda.is_available():
        return "cuda", str(torch.cuda.get_device_name())
    if asked == "cuda":
        raise ConfigError("--device cuda: torch finds no GPU here; use --device cpu")
    return "cpu", "CPU"


if __name__ == "__main__":
    sys.exit(command.run_main(main))
