"""The version of the package, for modules that must not import the Python API."""

__version__ = "0.1.0"
