"""The embedded engine: batched generation with transformers models, for CPU, CUDA and Apple silicon.

``core.Engine`` is the engine without HTTP; ``requests`` holds what goes in and comes out. Importing this package does
not import torch; its modules do. It refuses to train: the trainer has a model of its own.
"""
