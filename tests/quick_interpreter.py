"""Makes Triton's interpreter about twice as fast, without a change to what it computes."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any


def install() -> None:
    """Leave out work whose result the interpreter does not use.

    The interpreter has no public settings for this. With a Triton that has other private names it is only slower.
    """
    if find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    # Each integer operation is repeated in int64 to detect an overflow. The check acts only with `debug`, which is off.
    options = interpreter.interpreter_builder.options
    if hasattr(options, "sanitize_overflow") and not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)

    # A launch replaces the functions of `triton.language` by interpreted ones. Every call of a device function repeats
    # the search for functions to replace, and finds none.
    if hasattr(interpreter, "_patch_lang"):
        replace_functions = interpreter._patch_lang

        def replace_once(fn: Any) -> Any:
            # Each of these four stands for a namespace that a launch replaces as a whole.
            if any(map(tl.core.is_builtin, (tl.load, tl.core.load, tl.tensor.__add__, tl.math.exp))):
                return replace_functions(fn)
            return None  # to the call of a device function, which ignores it

        interpreter._patch_lang = replace_once
