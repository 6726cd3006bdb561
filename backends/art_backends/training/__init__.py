"""From scored trajectory groups to the next adapter version.

``requests``, ``versions``, ``sequences``, ``advantages`` and ``packing`` import no torch; the server may import
``versions`` and ``requests``. Everything else belongs in the worker process.
"""
