"""Everything behind the doors: capture, proxy, store, engines, training. Import what you need from its module."""

__version__ = "0.1.0"
