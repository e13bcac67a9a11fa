"""The checks of `preheat doctor`, in the order in which their findings are shown. No torch."""

from __future__ import annotations

from preheat.core.finding import Severity
from preheat.hardware.checks.packages import KERNEL_PACKAGES, is_installed
from preheat.hardware.checks.probing import Probe

__all__ = ["list_probes"]

_CHECKS = "preheat.hardware.checks"


def list_probes() -> list[Probe]:
    """Returns the checks of this machine; packages that are installed are imported, each in a process of its own."""
    stops = Severity.STOPS
    return [
        Probe("python", f"{_CHECKS}.packages:check_python"),
        Probe("packages", f"{_CHECKS}.packages:check_dependencies", failure=stops),
        Probe("torch", f"{_CHECKS}.packages:check_torch_copies"),
        # Two minutes: a cold network disk takes that long to read torch.
        Probe("torch", f"{_CHECKS}.torch_build:check_torch", seconds=120, failure=stops),
        Probe("driver", f"{_CHECKS}.driver:check_driver", failure=stops),
        *(
            Probe("kernels", f"{_CHECKS}.packages:check_package", (package.distribution,), seconds=120)
            for package in KERNEL_PACKAGES
            if is_installed(package.module)
        ),
        Probe("kernels", f"{_CHECKS}.packages:check_missing_packages"),
        Probe("compiler", f"{_CHECKS}.host:check_compiler"),
        Probe("threads", f"{_CHECKS}.host:check_threads"),
        Probe("memory", f"{_CHECKS}.host:check_memory"),
        Probe("memory", f"{_CHECKS}.host:check_shared_memory"),
        Probe("memory", f"{_CHECKS}.host:check_huge_pages"),
        Probe("disk", f"{_CHECKS}.storage:check_folders"),
        Probe("cache", f"{_CHECKS}.storage:check_native_folder"),
        Probe("hub", f"{_CHECKS}.storage:check_hub", seconds=15),
    ]
