"""The proxy: what the agent's model calls pass through, and where they are captured with their exact tokens.

This room never imports torch, transformers or vllm, and it opens no store of its own.
"""
