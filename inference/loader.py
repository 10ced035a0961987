"""vLLM load format `sealed`."""


def register_loader() -> None:
    """Registers the load format."""
