# For pyright: transformers as a module of unknown names. Its own index imports some 500 models, which take a third of
# the time of a check to read.
from typing import Any

def __getattr__(name: str) -> Any: ...
