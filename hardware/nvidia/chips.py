"""Peak arithmetic of NVIDIA's chips, by the names that the driver gives them: dense, without structured sparsity."""

from __future__ import annotations

import re

from hardware.base import Fact

# Name pattern, datasheet, TFLOP/s in bf16, tf32 and fp32. The first match counts: variants come before their family.
CHIPS = (
    (r"\bB200\b", "NVIDIA HGX B200 datasheet, an eighth", (2250, 1125, 75)),
    (r"\bH200 NVL\b", "NVIDIA H200 datasheet", (835.5, 417.5, 60)),
    (r"\bH200\b", "NVIDIA H200 datasheet", (989, 494, 67)),
    (r"\bH100 NVL\b", "NVIDIA H100 datasheet", (835.5, 417.5, 60)),
    (r"\bH100 PCIe\b", "NVIDIA H100 datasheet", (756, 378, 51)),
    (r"\bH[18]00\b", "NVIDIA H100 SXM datasheet", (989, 494, 67)),
    (r"\bA[18]00\b", "NVIDIA A100 datasheet", (312, 156, 19.5)),
    (r"\bL40S\b", "NVIDIA L40S datasheet", (362, 183, 91.6)),
    (r"\bL4\b", "NVIDIA L4 datasheet", (121, 60, 30.3)),
    (r"\bRTX 4090\b", "NVIDIA Ada architecture whitepaper", (165.2, 82.6, 82.6)),
)
UNKNOWN = Fact(None, "no figure for this chip", "unknown")


def peak_flops(name: str) -> dict[str, Fact]:
    """FLOP/s by dtype of the device that the driver calls `name`; facts without a value for a chip not in the table.

    A MIG partition is a share of a chip of which no figure is published.
    """
    for pattern, source, figures in CHIPS:
        if "MIG" not in name and re.search(pattern, name):
            bf16, tf32, fp32 = (Fact(figure * 1e12, source, "vendor") for figure in figures)
            return {"bf16": bf16, "fp16": bf16, "tf32": tf32, "fp32": fp32}
    return dict.fromkeys(("bf16", "fp16", "tf32", "fp32"), UNKNOWN)
