"""GPUs by name: what the project knows of them, in one table."""

import re

# Dense bf16 peak in FLOP/s and memory in bytes, from data sheets.
# The first match at the end of a word wins, so H100 PCIe comes before H100.
GPUS = {
    "GH200": (989e12, 96e9),
    "H200": (989e12, 141e9),
    "H100 PCIe": (756e12, 80e9),
    "H100 NVL": (835e12, 94e9),
    "H100": (989e12, 80e9),
    "H20": (148e12, 96e9),
    "A100": (312e12, 80e9),
    "A10G": (70e12, 24e9),
    "A10": (125e12, 24e9),
    "L40S": (362e12, 48e9),
    "B200": (2250e12, 180e9),
    "B300": (2250e12, 288e9),
    "RTX 5090": (209e12, 32e9),
    "RTX 4090": (165e12, 24e9),
    "RTX 3090": (71e12, 24e9),
}


def named(device_name):
    """The name in GPUS for a driver's name or one typed by hand; None if unknown. Laptop GPUs do not count: they share
    the name but are other chips."""
    for name in GPUS:
        pattern = name.replace(" ", "[ _-]?")
        if re.search(rf"(?<!\dx){pattern}\b(?!.* Laptop)", device_name or "", re.IGNORECASE):
            return name
    return None


def memory(device_name):
    """Memory in bytes: what GPUS says, or less if the name does (A100-SXM4-40GB, A100-40)."""
    said = re.search(r"(?<![a-z\d])(\d+)( ?G(i?B)?\b|$)", device_name, re.IGNORECASE)
    most = GPUS[named(device_name)][1]
    return min(most, float(said[1]) * 1e9) if said else most


def peak_flops(device_name):
    """The device's dense bf16 peak in FLOP/s; None if unknown."""
    name = named(device_name)
    return GPUS[name][0] if name else None
