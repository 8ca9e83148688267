"""One file for each kind of layer. Importing this package imports all of them, and with that registers them."""

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
