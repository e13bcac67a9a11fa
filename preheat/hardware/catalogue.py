"""Catalogue of accelerators: memory, bandwidth, peak and achieved rates. Does not import torch.

>>> find_accelerator("H100").bandwidth / 1e12
3.35
>>> find_accelerator("NVIDIA A100-SXM4-80GB").name
'A100-80GB'
>>> find_accelerator("H1000")
Traceback (most recent call last):
...
preheat.errors.RecipeError: no accelerator 'H1000' in the catalogue; did you mean 'H100'?
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from preheat.errors import RecipeError, suggest_nearest
from preheat.hardware.cuda_driver import is_slice

__all__ = ["Accelerator", "find_accelerator", "accelerators", "resolve_accelerator", "parse_accelerator"]


@dataclass(frozen=True)
class Accelerator:
    """Specification of one device; None if it has no such unit, or no figure is known.

    Attributes:
        memory: bytes that torch sees: less than marketed, by 1 to 3 %, and by 8 % if GDDR memory has ECC on.
        bandwidth: memory bandwidth, bytes/s.
        bf16, fp16, fp8: dense peak of the matrix units, FLOP/s.
        fp32: peak without TF32, FLOP/s.
        achieved_bf16, achieved_fp8: best rate measured over many matmul shapes, FLOP/s.
        link: bandwidth to the other devices in the host (AMD: to each of them), one direction, bytes/s.
        network: network bandwidth per device in a typical host, one direction, bytes/s.
        watts: maximum board power by the data sheet; None for Grace Hopper, which shares it with CPU and memory.
        host: bandwidth to host memory, one direction, bytes/s.
        units: number of SMs or CUs.
        cache: bytes of the L2 cache that all SMs share.
        cache_rate: bytes/s, read and written, of kernels whose operands and results stay in it.
        generation: architecture; measurements of one device roughly apply to others of its generation.
    """

    name: str
    memory: int | None
    bandwidth: float | None
    bf16: float | None
    fp16: float | None
    fp32: float | None
    fp8: float | None
    achieved_bf16: float | None
    achieved_fp8: float | None
    link: float | None
    network: float | None
    watts: float | None = None
    host: float | None = None
    units: int | None = None
    generation: str = "other"
    cache: int | None = None
    cache_rate: float | None = None

    @property
    def link_each(self) -> bool:
        """True if `link` is the bandwidth to each peer, so that the total is higher."""
        return self.generation == "cdna"

    def peaks(self) -> dict[str, float]:
        """Returns {dtype: peak FLOP/s} of the data sheet."""
        # bf16 and fp16 have one rate on matrix units that support both; V100 and T4, or a user's device, state only
        # one.
        rates = {"bf16": self.bf16 or self.fp16, "fp16": self.fp16 or self.bf16, "fp32": self.fp32, "float8": self.fp8}
        if self.bf16 and self.generation in _TF32:
            rates["tf32"] = self.bf16 / 2
        return {dtype: rate for dtype, rate in rates.items() if rate}

    def sustained(self, *, alone: bool = False) -> dict[str, float]:
        """Returns {dtype: FLOP/s} of large matmuls in training, where power limits lower the clocks.

        Args:
            alone: no collectives run beside them.
        """
        # Achieved figures are for bf16, and fp16 runs at the same rate.
        achieved = {"bf16": self.achieved_bf16, "fp16": self.achieved_bf16, "float8": self.achieved_fp8}
        share = (_SUSTAINED | _ALONE if alone else _SUSTAINED).get(self.generation, 0.75)
        return {
            # fp32 without TF32 does not use the matrix units, so their achievable fraction does not apply.
            dtype: share * (achieved.get(dtype) or peak * (1.0 if dtype == "fp32" else _ACHIEVED))
            for dtype, peak in self.peaks().items()
        }


# Fraction of the data sheet's rate that the best matmul reaches: about the median of the devices with a figure.
_ACHIEVED = 0.82
# NVIDIA generations with TF32, at half the bf16 rate by their data sheets: 156 of 312 (A100), 494.7 of 989 (H100),
# 183 of 366 (L40S), 82.6 of 165.2 (RTX 4090), 1,125 of 2,250 (B200), all dense.
_TF32 = ("ampere", "ada", "hopper", "blackwell", "blackwell-rtx")
# Fraction of the best measured rate that large matmuls sustain in training. Fitted to the published training speeds of
# half the sources in benchmarks/results/published.md; the other half is held out. Blackwell's is between two torchao
# results (0.55) and eight of NVIDIA's; 0.62 to 0.74 fit about equally well. No published run is on a workstation's
# Blackwell: it has Ada's, whose kind of matrix instruction (warp-wide, from registers) it shares.
_SUSTAINED = {"ampere": 0.92, "ada": 0.85, "hopper": 0.72, "blackwell": 0.65, "blackwell-rtx": 0.85, "cdna": 0.7}
# The same on one device, where no collective takes multiprocessors, bandwidth and power: all matmuls of an 8B LoRA and
# of an 8B QLoRA step together, on one H100 (benchmarks/results/gpu_layer.md).
_ALONE = {"hopper": 0.92}

# Fraction of the peak matmul rate, forward and backward, counting causal work only.
ATTENTION_SHARES: Mapping[str, tuple[float, float]] = {
    # FlashAttention-2 (arXiv:2307.08691, figures 4 and 6: head dim 128, 2k to 8k tokens, A100 and H100);
    # FlashAttention-3 (2407.08608) is not assumed.
    "ampere": (0.62, 0.52),
    "ada": (0.62, 0.52),
    "hopper": (0.38, 0.33),
    "blackwell": (0.45, 0.38),
    "blackwell-rtx": (0.62, 0.52),  # runs FlashAttention-2 as Ada does
    "cdna": (0.45, 0.35),
}

# Sources:
# - Bandwidth, bf16, fp8 and link of data-centre devices: the accelerator and network chapters of
#   stas00/ml-engineering; A100-40GB and A800: data sheets; H100-96GB: torchtitan's benchmarks; V100: bigscience,
#   gpt2.md.
# - L40 to RTX-2080Ti, H100-NVL, H800, H20, RTX-PRO-6000 to RTX-5060Ti: data sheets and NVIDIA's architecture papers;
#   GeForce: dense bf16 (Turing: fp16) with fp32 accumulation. A10G's bf16 is uncertain (70; an A10 has 125).
# - Achieved of L4, H20: large products measured by owners (github.com/zzc0721/torch-performance-test-data); theirs of
#   GeForce are 0.9 to 1.15 of the data sheet's rate, of the RTX PRO 6000 0.82.
# - Network: the same chapter, if hosts of a kind of device commonly have one rate (8 H100s: 8 x 400 Gbit/s); A100 hosts
#   have 200 to 1600 Gbit/s, so they have no figure.
# - Achieved: the "maximum achievable matmul FLOPS" finder of stas00/ml-engineering: A100 torch 2.6, A100-PCIe 2.5.1,
#   H100 to B200 2.7 (H200's bf16 is stated to be H100's), B300 2.9.1, GB200 2.10, MI300X 2.5.1, MI355X 2.8.
# - fp32, units: data sheets. fp16 equals bf16 on devices with both; T4 and V100 have no bf16 matrix units.
# - Watts: data sheets with one figure for the device; H100-96GB and A800: similar devices of that power limit.
# - Host: PCIe x16 by generation, 15.75, 31.5 or 63 GB/s (PCI-SIG), by the data sheets; GH200: NVLink-C2C, 900 GB/s in
#   both directions together.
# - Memory: the least total that torch prints on Linux in public logs and messages, rounded down; without one, that of a
#   device of the same memory (most GeForce of 12 and 16 GB, A10, A30, GH200, H100-SXM-96GB). RTX A6000 and RTX 6000 Ada
#   have ECC off, as shipped. Gaudi, TPU and Trainium: as marketed.
#
# Rates in TFLOP/s, bandwidths in GB/s; bf16* and fp8* are the achieved rates. A800 is the A100 for export,
# H100-SXM-96GB has HBM2e and 500 W, the 96 GB GH200 has 4.0 TB/s, V100s reach 30 to 60 TFLOP/s in training, and
# MI300X's link is to each peer.
_TABLE = """
name              GiB   GB/s  bf16  fp16  fp32   fp8   bf16*   fp8*    link  network  units  watts  host   generation
A100-80GB         79.1  2039  312   312   19.5   -     271.2   -       300   -        108    400    31.5   ampere
A100-40GB         39.4  1555  312   312   19.5   -     -       -       300   -        108    400    31.5   ampere
A100-PCIe-80GB    79.1  1940  312   312   19.5   -     252.9   -       31    -        108    300    31.5   ampere
A800-80GB         79.1  2039  312   312   19.5   -     -       -       200   -        108    400    31.5   ampere
H100              79.0  3350  989   989   67     1979  794.5   1402.6  450   50       132    700    63     hopper
H100-SXM-96GB     95.0  2400  989   989   67     1979  -       -       450   50       132    500    63     hopper
H100-PCIe         79.0  2000  756   756   51     1513  -       -       63    -        114    350    63     hopper
H100-NVL          93.0  3938  835   835   60    1671  -       -       300   -        132    400    63     hopper
H800              79.0  3350  989   989   67     1979  -       -       200   50       132    700    63     hopper
H20               95.0  4000  148   148   44     296   142     -       450   50       78     400    63     hopper
H200              139.7 4800  989   989   67     1979  794.5   1453.4  450   50       132    700    63     hopper
GH200-SXM         139.7 4800  989   989   67     1979  828.6   1535.0  450   -        132    -      450    hopper
B200              178.3 8000  2250  2250  75     4500  1745.0  3432.5  900   50       148    1000   63     blackwell
B300              267.6 8000  2250  2250  75     4500  1769.0  3353.3  900   100      148    -      -      blackwell
GB200             184.3 8000  2500  2500  80     5000  1822.0  3615.6  900   -        148    -      -      blackwell
GB300             276.5 8000  2500  2500  80     5000  -       -       900   -        148    -      -      blackwell
RTX-PRO-6000      94.9  1792  504   504   126    1008  -       -       63    -        188    600    63     blackwell-rtx
RTX-5090          31.3  1792  209.5 209.5 104.8  419   -       -       63    -        170    575    63     blackwell-rtx
RTX-5080          15.5  960   112.6 112.6 56.3   225.1 -       -       63    -        84     360    63     blackwell-rtx
RTX-5070Ti        15.5  896   87.9  87.9  43.9   175.8 -       -       63    -        70     300    63     blackwell-rtx
RTX-5070          11.6  672   61.7  61.7  30.9   123.5 -       -       63    -        48     250    63     blackwell-rtx
RTX-5060Ti-16GB   15.5  448   47.4  47.4  23.7   94.9  -       -       31    -        36     180    31.5   blackwell-rtx
L40S              44.3  864   362   362   91.6   733   -       -       31    -        142    350    31.5   ada
L40               44.3  864   181   181   90.5   362   -       -       31    -        142    300    31.5   ada
L4                22.0  300   121   121   30.3   242   70.9    -       31    -        58     72     31.5   ada
A10G-24GB         22.0  600   70    70    31.2   -     -       -       31    -        72     -      31.5   ampere
A10               22.0  600   125   125   31.2   -     -       -       31    -        72     150    31.5   ampere
A30               23.5  933   165   165   10.3   -     -       -       100   -        56     165    31.5   ampere
A40               44.4  696   149.7 149.7 37.4   -     -       -       56    -        84     300    31.5   ampere
A6000-48GB        47.4  768   155   155   38.7   -     -       -       56    -        84     300    31.5   ampere
A6000-Ada-48GB    47.4  960   364   364   91.1   728   -       -       31    -        142    300    31.5   ada
A5000-24GB        23.5  768   111   111   27.8   -     -       -       56    -        64     230    31.5   ampere
A4000-16GB        15.5  448   76.7  76.7  19.2   -     -       -       31    -        48     140    31.5   ampere
RTX-3090          23.5  936   71    71    35.6   -     -       -       56    -        82     350    31.5   ampere
RTX-3090Ti        23.5  1008  80    80    40     -     -       -       56    -        84     450    31.5   ampere
RTX-3080-10GB     9.6   760   59.5  59.5  29.8   -     -       -       31    -        68     320    31.5   ampere
RTX-3080Ti        11.6  912   68.2  68.2  34.1   -     -       -       31    -        80     350    31.5   ampere
RTX-3060-12GB     11.6  360   25.5  25.5  12.7   -     -       -       31    -        28     170    31.5   ampere
RTX-4090          23.5  1008  165   165   82.6   330   -       -       31    -        128    450    31.5   ada
RTX-4080-SUPER    15.5  736   104.4 104.4 52.2   208.8 -       -       31    -        80     320    31.5   ada
RTX-4080          15.5  717   97.5  97.5  48.7   194.9 -       -       31    -        76     320    31.5   ada
RTX-4070Ti-SUPER  15.5  672   88    88    44.1   176   -       -       31    -        66     285    31.5   ada
RTX-4070-SUPER    11.6  504   70.9  70.9  35.5   141.8 -       -       31    -        56     220    31.5   ada
RTX-4070          11.6  504   58.3  58.3  29.1   116.6 -       -       31    -        46     200    31.5   ada
RTX-4060Ti-16GB   15.5  288   44.1  44.1  22.1   88.2  -       -       15.75 -        34     165    15.75  ada
T4                14.5  320   -     65    8.1    -     -       -       16    -        40     70     15.75  turing
RTX-2080Ti        10.5  616   -     53.8  13.4   -     -       -       16    -        68     250    15.75  turing
V100-32GB         31.7  900   -     125   15.7   -     -       -       150   -        80     300    15.75  volta
V100-16GB         15.7  900   -     125   15.7   -     -       -       150   -        80     300    15.75  volta
MI250X            127.9 3280  383   383   47.9   -     -       -       50    -        220    560    -      cdna
MI300X            191.6 5300  1307  1307  163.4  2610  668.4   -       64    -        304    750    63     cdna
MI325X            255.6 6000  1300  1300  163.4  2610  784.9   -       64    -        304    1000   63     cdna
MI355X            287.9 8000  2500  2500  157.3  5000  1565.0  -       76.5  -        256    1400   63     cdna
Gaudi2            96    2460  432   432   -      865   418.7   826.5   300   -        -      600    -      other
Gaudi3            128   3700  1677  1677  -      1677  1243.0  1289.5  600   -        -      900    -      other
TPU-v4            32    1200  275   -     -      -     -       -       -     -        -      -      -      other
TPU-v5p           95    2760  459   -     -      -     -       -       -     -        -      -      -      other
TPU-v5e           16    820   197   -     -      -     -       -       -     -        -      -      -      other
TPU-v6e           -    -     918   -     -      918   -       -       -     -        -      -      -      other
Trainium2         96    2900  667   667   181    1299  -       -       640   -        -      -      -      other
"""

# L2 caches: MiB, and GB/s read and written by a kernel that is repeated on a working set in the cache, without its
# launch. Without a rate, plans count memory bandwidth.
# - Sizes: NVIDIA's architecture papers (A100 40, H100 and H200 50, AD102 96, of which an RTX 4090 has 72, GA102 6;
#   AD103 64 and 48, AD104 48 and 36, AD106 32).
# - Rates: te42kyfo/gpu-benches, gpu-small-kernels/*_graph.txt (A100 80 GB, H200, L40, A40), the slope of time over
#   bytes from 2 MB to 0.75 of the cache, best block size. Cards with the same chip and clock share its rate.
# - H100-PCIe: that of the H200 by the ratio of the two in gpu-l2-cache/*.txt of the same source (7.0 and 9.9 TB/s).
# - Other RTX 40: 30 GB/s an SM, between the measured 28.5 (RTX 4090) and 32.3 (L40) of the same generation and clock.
# - RTX-4090: smallscientist1/cuda_microbenchmark, analysis_RTX4090.md, a copy of 16 MB.
_CACHES = """
A100-80GB       40  3790
A100-40GB       40  3790
A100-PCIe-80GB  40  3790
A800-80GB       40  3790
H100            50  5790
H100-SXM-96GB   50  5790
H800            50  5790
H200            50  5790
L40S            96  4590
L40             96  4590
A6000-Ada-48GB  96  4590
A40             6   2430
A6000-48GB      6   2430
RTX-4090        72  3645
H100-PCIe       50  4090
RTX-4080-SUPER  64  2400
RTX-4080        64  2280
RTX-4070Ti-SUPER 48 1980
RTX-4070-SUPER  48  1680
RTX-4070        36  1380
RTX-4060Ti-16GB 32  1020
"""

# Other names of the rows above, as drivers and users write them, normalized by `_normalize_name`.
_ALIASES = {
    "a100": "A100-80GB",
    "a100sxm480gb": "A100-80GB",
    "a100sxm440gb": "A100-40GB",
    "a100pcie40gb": "A100-40GB",
    "a100pcie": "A100-PCIe-80GB",
    "a800": "A800-80GB",
    "a800sxm480gb": "A800-80GB",
    "h100sxm": "H100",
    "h10080gbhbm3": "H100",
    "gh200": "GH200-SXM",
    "gh200480gb": "GH200-SXM",
    "a10g": "A10G-24GB",
    "a6000": "A6000-48GB",
    "rtxa6000": "A6000-48GB",
    "a6000ada": "A6000-Ada-48GB",
    "rtx6000ada": "A6000-Ada-48GB",
    "rtx6000adageneration": "A6000-Ada-48GB",
    "rtxpro6000blackwellworkstationedition": "RTX-PRO-6000",
    "rtxpro6000blackwellserveredition": "RTX-PRO-6000",
    "rtxpro6000blackwell": "RTX-PRO-6000",
    "a4000": "A4000-16GB",
    "rtxa4000": "A4000-16GB",
    "a5000": "A5000-24GB",
    "rtxa5000": "A5000-24GB",
    "rtx3060": "RTX-3060-12GB",
    "rtx3080": "RTX-3080-10GB",
    "v100": "V100-32GB",
    "v100sxm232gb": "V100-32GB",
    "v100sxm216gb": "V100-16GB",
}


def _normalize_name(name: str) -> str:
    """Normalizes a name for lookup: removes case, punctuation and vendor."""
    # Vendors first, because \b needs the spaces and dashes that the next line removes.
    text = re.sub(r"\b(nvidia|geforce|tesla|amd|instinct|aws|google|intel)\b", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", text)


def _parse_number(cell: str, unit: float) -> float | None:
    return None if cell == "-" else float(cell) * unit


def _read_rows() -> dict[str, Accelerator]:
    rows = {}
    caches = {name: (int(size), float(rate)) for name, size, rate in map(str.split, _CACHES.strip().splitlines())}
    # Without the header; `#` begins a comment in the table.
    for line in _TABLE.strip().splitlines()[1:]:
        name, memory, bandwidth, bf16, fp16, fp32, fp8, achieved_bf16, achieved_fp8, link, network, *more = (
            line.partition("#")[0].split()
        )
        cache, cache_rate = caches.get(name, (None, None))
        rows[name] = Accelerator(
            name=name,
            memory=None if memory == "-" else int(float(memory) * 2**30),
            bandwidth=_parse_number(bandwidth, 1e9),
            bf16=_parse_number(bf16, 1e12),
            fp16=_parse_number(fp16, 1e12),
            fp32=_parse_number(fp32, 1e12),
            fp8=_parse_number(fp8, 1e12),
            achieved_bf16=_parse_number(achieved_bf16, 1e12),
            achieved_fp8=_parse_number(achieved_fp8, 1e12),
            link=_parse_number(link, 1e9),
            network=_parse_number(network, 1e9),
            units=None if more[0] == "-" else int(more[0]),
            watts=_parse_number(more[1], 1),
            host=_parse_number(more[2], 1e9),
            generation=more[3],
            cache=cache and cache * 2**20,
            cache_rate=cache_rate and cache_rate * 1e9,
        )
    return rows


def accelerators() -> dict[str, Accelerator]:
    """Returns all accelerators of the catalogue by name."""
    return _read_rows()


def find_accelerator(name: str) -> Accelerator:
    """Looks up an accelerator by its catalogue name, a short name (`A100`) or the driver's name.

    Raises:
        RecipeError: the name is unknown; the message suggests the closest one.
    """
    rows = _read_rows()
    if is_slice(name):
        raise RecipeError(
            f"'{name}' is a slice of a GPU (MIG), whose rates the catalogue lacks; plan on the machine that has it, "
            "where they are measured"
        )
    by_key = {_normalize_name(known): known for known in rows} | _ALIASES
    match = by_key.get(_normalize_name(name)) or by_key.get(f"rtx{_normalize_name(name)}")  # 4090
    if match is None:
        # Normalized keys, so that case and punctuation do not count.
        near = difflib.get_close_matches(_normalize_name(name), by_key, n=1)
        raise RecipeError(
            f"no accelerator '{name}' in the catalogue; "
            f"{suggest_nearest(by_key[near[0]] if near else name, list(rows))}"
        )
    return rows[match]


_RATES = {
    "bf16": 1e12,
    "fp16": 1e12,
    "fp32": 1e12,
    "fp8": 1e12,
    "bandwidth": 1e9,
    "link": 1e9,
    "network": 1e9,
    "host": 1e9,
    "watts": 1.0,
}


def resolve_accelerator(text: str) -> Accelerator:
    """Returns the accelerator that `--gpu` names, or describes by its figures (`parse_accelerator`).

    Raises:
        RecipeError: the name is unknown, or there is too little to plan with; the message has the option's name.

    Example:
        >>> resolve_accelerator("RTX-4090").name
        'RTX-4090'
        >>> resolve_accelerator("name=X,memory=24GiB,bandwidth=1008,bf16=165").name
        'X'
    """
    if "=" in text:
        return parse_accelerator(text)
    describe = "describe the device: --gpu name=X,memory=24GiB,bandwidth=1008,bf16=165, in GB/s and TFLOP/s"
    try:
        entry = find_accelerator(text)
    except RecipeError as error:
        raise RecipeError(f"--gpu: {error} (--gpu list prints all); or {describe}") from None
    if entry.memory is None or entry.bandwidth is None or not entry.peaks():
        raise RecipeError(f"--gpu: the catalogue lacks the memory, bandwidth or rate of {entry.name}; {describe}")
    return entry


def parse_accelerator(text: str) -> Accelerator:
    """Parses a user-defined accelerator: `name=X,memory=24GiB,bandwidth=1008,bf16=165`, in GB/s and TFLOP/s.

    Other keys: fp16, fp32, fp8 (TFLOP/s); link (to other devices), network, host (to host memory) in GB/s; watts.

    Raises:
        RecipeError: a key is unknown, a value is not a number, or memory, bandwidth or a matmul rate is missing.

    Example:
        >>> parse_accelerator("memory=24GiB,bandwidth=1008,bf16=165").bf16 / 1e12
        165.0
    """
    from preheat.hardware.probe import parse_memory

    known = ["name", "memory", *_RATES]
    # Fields without a default have to be passed; None means unknown.
    values: dict[str, Any] = dict.fromkeys(
        f.name for f in dataclasses.fields(Accelerator) if f.default is dataclasses.MISSING
    )
    values["name"] = "stated device"
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in known or not equals:
            raise RecipeError(f"--gpu: '{part}': {suggest_nearest(key, known)}; write key=value, with commas between")
        if key == "name":
            values[key] = value
        elif key == "memory":
            values[key] = parse_memory(value, "--gpu: memory")
        # A pattern instead of float(), which also accepts nan, inf and negative numbers.
        elif not re.fullmatch(r"\d+(\.\d+)?", value) or float(value) == 0:
            unit = {1e12: "TFLOP/s", 1e9: "GB/s", 1.0: "watts"}[_RATES[key]]
            raise RecipeError(
                f"--gpu: {key}: '{value}' is not a {'power' if key == 'watts' else 'rate'}; write a number of {unit}"
            )
        else:
            values[key] = float(value) * _RATES[key]
    lacking = [key for key in ("memory", "bandwidth") if values[key] is None]
    # One matmul rate is enough, because `peaks` uses it for both half-precision dtypes.
    lacking += [] if values["bf16"] or values["fp16"] else ["bf16"]
    if lacking:
        raise RecipeError(
            f"--gpu: {values['name']} needs {' and '.join(lacking)} too, as in memory=24GiB,bandwidth=1008,bf16=165"
        )
    return Accelerator(**values)
