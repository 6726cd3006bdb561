"""The server: control API, proxy, policy, and the supervisor of the worker. Entry point: ``server.run.serve``.

Never imports torch, transformers or vllm: the worker is a child process.
"""
