"""vLLM as the engine: where its own environment lies, how it is started, and the process that keeps it.

It speaks the engine protocol over HTTP, so that nothing of it is imported here: its torch and its other needs are kept
apart in an environment of its own. It refuses to run inside any process of ours.
"""
