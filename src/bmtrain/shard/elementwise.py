"""Names of torch's functions, by what they need of a sharded tensor."""

from __future__ import annotations

_ARITHMETIC = (
    "abs absolute acos add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not "
    "bitwise_or bitwise_xor ceil clamp "
    "clamp_max clamp_min clip copysign cos cosh deg2rad div divide eq erf erfc exp "
    "exp2 expm1 fill float_power floor "
    "floor_divide fmax fmin fmod frac ge gelu greater greater_equal gt heaviside hypot "
    "isfinite isinf isnan isneginf "
    "isposinf le lerp less less_equal lgamma log log10 log1p log2 logaddexp "
    "logical_and logical_not logical_or logical_xor "
    "logit lt masked_fill maximum minimum mul multiply nan_to_num ne neg negative "
    "nextafter not_equal positive pow "
    "reciprocal relu remainder round rsqrt rsub sgn sigmoid sign signbit silu sin sinc "
    "sinh softplus sqrt square sub "
    "subtract tan tanh threshold true_divide trunc where xlogy zero"
)
_OPERATORS = (
    "__abs__ __add__ __and__ __div__ __eq__ __floordiv__ __ge__ __gt__ __iadd__ "
    "__iand__ __idiv__ __ifloordiv__ __imod__ "
    "__imul__ __invert__ __ior__ __ipow__ __isub__ __itruediv__ __ixor__ __le__ __lt__ "
    "__mod__ __mul__ __ne__ __neg__ "
    "__or__ __pos__ __pow__ __radd__ __rand__ __rdiv__ __rfloordiv__ __rmod__ __rmul__ "
    "__ror__ __rpow__ __rsub__ "
    "__rtruediv__ __rxor__ __sub__ __truediv__ __xor__"
)
_COPIES = (
    "alias bfloat16 bool clone contiguous copy cpu cuda detach double empty_like float "
    "full_like half int long ones_like to type "
    "type_as zeros_like"
)

#: Each element of the result depends only on the elements of the operands at the same place. The
#: names of in-place variants end in "_".
ELEMENTWISE = frozenset(f"{_ARITHMETIC} {_OPERATORS} {_COPIES}".split())

#: Functions of lists of tensors; so are those above with `_foreach_` before the name.
FUSED = frozenset(("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"))

#: Metadata, not values: what they say of the whole tensor needs no memory of it.
ABOUT = frozenset(
    [
        "__hash__",
        "__len__",
        "can_cast",
        "dense_dim",
        "detach_",
        "dim",
        "dim_order",
        "element_size",
        "get_device",
        "has_names",
        "is_coalesced",
        "is_complex",
        "is_conj",
        "is_contiguous",
        "is_distributed",
        "is_floating_point",
        "is_inference",
        "is_neg",
        "is_same_size",
        "is_signed",
        "ndimension",
        "nelement",
        "numel",
        "numpy_dtype",
        "requires_grad_",
        "result_type",
        "retain_grad",
        "size",
        "sparse_dim",
        "storage_offset",
        "stride",
        "register_hook",
        "register_post_accumulate_grad_hook",
    ]
)

#: Functions of another tensor that read only the shape, dtype or device of this one.
SHAPED_LIKE = frozenset(
    [
        "expand_as",
        "view_as",
        "reshape_as",
        "new_empty",
        "new_full",
        "new_ones",
        "new_tensor",
        "new_zeros",
    ]
)

#: They fill a tensor with random numbers.
RANDOM = frozenset(
    [
        "bernoulli_",
        "cauchy_",
        "dropout_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "rrelu_",
        "uniform_",
    ]
)

#: They return random numbers.
DRAWN = frozenset(
    ["bernoulli", "multinomial", "normal", "poisson", "rand_like", "randint_like", "randn_like"]
)

#: They need memory that holds the whole tensor, which no rank has.
OF_MEMORY = frozenset(
    [
        "__cuda_array_interface__",
        "__dlpack__",
        "data_ptr",
        "is_set_to",
        "is_shared",
        "pin_memory",
        "resize_",
        "resize_as_",
        "set_",
        "share_memory_",
        "storage",
        "swap_dims_",
        "swapaxes_",
        "swapdims_",
        "t_",
        "transpose_",
        "untyped_storage",
    ]
)


def writes(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_")
