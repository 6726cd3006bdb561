"""Engines: what answers model calls with token ids and log-probabilities.

``embedded`` runs transformers models in this process (CPU, CUDA, Apple silicon); other engines are servers that speak
the same protocol over HTTP. It refuses to know about stores, rollouts and training.
"""
