"""The child process that holds the embedded engine and the trainer. Started by the server, never imported by it."""
