"""Makes Triton's interpreter about four times as fast, without a change to what it computes."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any


def install() -> None:
    """Leave out work whose result the interpreter does not use, and remember what it computes again and again.

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

    # An interpreted function calls a wrapper that checks for `_semantic`. It may call the function itself.
    if hasattr(interpreter, "_patch_attr"):

        def replace(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
            function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

            def call(*arguments: Any, **options: Any) -> Any:
                options["_semantic"] = semantic
                return function(*arguments, **options)

            scope.set_attr(obj, name, call)

        interpreter._patch_attr = replace

    if hasattr(interpreter, "_get_np_dtype"):
        find_dtype = interpreter._get_np_dtype
        dtypes: dict[str, Any] = {}

        def numpy_dtype(dtype: Any) -> Any:
            name = dtype.scalar.name
            if name not in dtypes:
                dtypes[name] = find_dtype(dtype)
            return dtypes[name]

        interpreter._get_np_dtype = numpy_dtype

    _share_shapes(tl.core)
    _skip_conversions(tl.core, interpreter.interpreter_semantic)


def _share_shapes(core: Any) -> None:
    """Let all types of one shape share it, and all tensors of one shape."""
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    of_types: dict[tuple[int, ...], tuple[Any, ...]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def new_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in getattr(shape, "values", shape)])
        if sizes in of_types:
            self.element_ty = element_ty
            self.shape, self.numel, name = of_types[sizes]
            self.name = f"{name}{element_ty}>"
        else:
            make_type(self, element_ty, shape)
            if vars(self).keys() == {"element_ty", "shape", "numel", "name"}:
                of_types[sizes] = self.shape, self.numel, self.name.removesuffix(f"{element_ty}>")

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(getattr(type.shape, "values", type.shape)) if type.is_block() else ()
        if sizes in of_tensors:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = of_tensors[sizes]
        else:
            make_tensor(self, handle, type)
            if vars(self).keys() == {"handle", "type", "dtype", "shape", "numel"}:
                of_tensors[sizes] = self.shape, self.numel

    core.block_type.__init__, core.tensor.__init__ = new_type, new_tensor


def _skip_conversions(core: Any, semantic: Any) -> None:
    """Return arguments at once where there is nothing to convert: no wrapper around a number, and no other shape."""
    if hasattr(core, "_unwrap_if_constexpr"):
        unwrap, plain = core._unwrap_if_constexpr, {core.tensor, int, float, bool, str, type(None)}

        def unwrap_if_needed(o: Any) -> Any:
            return o if type(o) in plain else o.value if type(o) is core.constexpr else unwrap(o)

        core._unwrap_if_constexpr = unwrap_if_needed

    if hasattr(semantic, "broadcast_impl_value"):
        broadcast = semantic.broadcast_impl_value

        def broadcast_if_needed(lhs: Any, rhs: Any) -> Any:
            if lhs.shape is rhs.shape:
                return lhs, rhs
            if lhs.type.is_block() and rhs.type.is_block() and len(lhs.shape) == len(rhs.shape):
                shapes = lhs.type.shape.values, rhs.type.shape.values
                common = [*map(max, *shapes)]
                if all(size in (1, most) for sizes in shapes for size, most in zip(sizes, common, strict=True)):
                    return tuple(
                        x if x.type.shape.values == common else semantic.broadcast_impl_shape(x, common)
                        for x in (lhs, rhs)
                    )
            return broadcast(lhs, rhs)

        semantic.broadcast_impl_value = broadcast_if_needed

    if hasattr(semantic, "binary_op_type_checking_impl"):
        convert, integers = semantic.binary_op_type_checking_impl, {"int32", "int64"}

        def takes_type(number: Any, x: Any, on_bits: bool) -> bool:
            kind, name = type(number), x.dtype.name
            if on_bits or (kind is int and not -(2**31) <= number < 2**31):
                return False
            return kind in (int, float) if name == "fp32" else kind is int and name in integers

        def convert_if_needed(lhs: Any, rhs: Any, *options: bool, **named: bool) -> Any:
            if not named and type(lhs) is core.tensor and type(rhs) is core.tensor:
                name = rhs.dtype.name
                is_same = name == lhs.dtype.name and (name in integers or name in ("fp32", "int1"))
                if is_same or (name in integers and options == (True, True) and lhs.dtype.is_ptr()):
                    return semantic.broadcast_impl_value(lhs, rhs)
            elif not named and type(lhs) is core.tensor and takes_type(rhs, lhs, not all(options[2:3])):
                return semantic.broadcast_impl_value(lhs, semantic.scalar_constant(rhs, lhs.dtype))
            elif not named and type(rhs) is core.tensor and takes_type(lhs, rhs, not all(options[2:3])):
                return semantic.broadcast_impl_value(semantic.scalar_constant(lhs, rhs.dtype), rhs)
            return convert(lhs, rhs, *options, **named)

        semantic.binary_op_type_checking_impl = convert_if_needed
