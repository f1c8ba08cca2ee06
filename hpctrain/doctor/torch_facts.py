"""What torch says of itself, as one JSON line; run by `hpctrain doctor` in a process of its own."""

from __future__ import annotations

import json
import re
import sys

__all__ = ["main", "parse_config"]


def main() -> int:
    """Print the facts; an exception means that torch cannot be used."""
    import torch

    has_gpus = torch.cuda.is_available()
    facts = {
        "version": torch.__version__,
        "path": torch.__path__[0],
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if has_gpus
        else [],
        "nccl": _nccl_version() if has_gpus else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "mkldnn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        "lapack": torch._C.has_lapack,
        "compute_works": _computes(torch.device("cpu")),
        "gpu_computes": _computes(torch.device("cuda")) if has_gpus else None,
        **parse_config(torch.__config__.show()),
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    return 0


def parse_config(text: str) -> dict[str, str | None]:
    """Find the math library and the oneDNN version in torch's build description. Pure."""
    blas = re.search(r"\bBLAS_INFO=(\w+)", text)
    onednn = re.search(r"Intel\(R\) MKL-DNN v([\d.]+)", text)
    acl = re.search(r"USE_MKLDNN_ACL=(?:ON|1)|mkldnn_acl", text, re.IGNORECASE)
    mkl = re.search(r"oneAPI Math Kernel Library Version ([\d.]+)", text)
    return {
        "blas": blas.group(1) if blas else None,
        "onednn": onednn.group(1) if onednn else None,
        "acl": "yes" if acl else None,
        "mkl": mkl.group(1) if mkl else None,
    }


def _nccl_version() -> str | None:
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _computes(device: object) -> bool:
    """Multiply two small matrices and compare with the known product."""
    import torch

    ones = torch.ones(64, 64, device=device)  # type: ignore[call-overload]
    return bool(((ones @ ones) == 64).all())


if __name__ == "__main__":
    sys.exit(main())
