"""The command ``pixfuse``. Nothing else in the package imports it."""
