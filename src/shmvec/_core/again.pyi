from collections.abc import Callable

def raises_again(attempt: Callable[..., object], *arguments: object) -> bool:
    """Whether what has raised does so again while no signal's handler can run."""
