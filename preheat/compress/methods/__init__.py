"""Compression methods, one file each. Importing this package imports every module of the folder. Imports no torch."""

import importlib
import pkgutil

# Importing a module registers its method (`Method.__init_subclass__`).
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
