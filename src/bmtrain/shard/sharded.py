"""torch's functions on sharded tensors: on slices where those suffice, else on gathered ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import AddressError, ParameterError
from bmtrain.shard import elementwise
from bmtrain.shard.cut import Cut
from bmtrain.shard.slices import (
    Slices,
    check_alike,
    communicate,
    look_whole,
    norm,
    total,
    write_in_graph,
)
from bmtrain.shard.window import Window, WindowSource, as_copy, shares_memory, written_uncounted
from bmtrain.torch_internals import (
    SCRIPTED,
    is_collective,
    is_of_torch,
    map_tensors,
    plain_functions,
    tensors_of,
    untraced,
)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Sharded(Slices):
    """This rank's slice of a flattened tensor, with the whole's shape, dtype and device.

    Element-wise functions run on the slices; norms and sums are a local reduction and one
    collective; every other function gathers its sharded arguments, differentiably, and runs on
    whole tensors. So a program computes what it computes in one process, or is refused
    (ParameterError); all ranks must run it.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        return run(func, args, kwargs or {})


Sharded.kind = Sharded


@untraced
def run(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`func(*args, **kwargs)` with sharded tensors among them, as one process computes it.

    Collective if it needs values.

    Raises:
        AddressError: for a function that needs memory that holds the whole tensor.
    """
    name: str = getattr(func, "__name__", "") if is_of_torch(func) else ""
    if name in ("__get__", "__set__", "__delete__"):
        return _access(func, name, args)
    if name in elementwise.OF_MEMORY:
        raise AddressError(
            f"{name} of a sharded tensor: no rank holds all of it in memory. Use param.gather(), "
            "a whole copy, or param.local, this rank's slice; a module whose kernels read memory "
            "can be made a bmtrain.Block."
        )
    if name in elementwise.ABOUT or func is torch.autograd.backward:
        return _natively(func, args, kwargs)
    if is_collective(func):
        return communicate(func, args, kwargs)
    special = _SPECIAL.get(name)
    out = NotImplemented if special is None else special(func, args, kwargs)
    if out is NotImplemented and name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        out = _on_lists(func, name, args, kwargs)
    # without the "_" of variants in place
    base = name if name.startswith("__") else name.rstrip("_")
    if out is NotImplemented and base in elementwise.ELEMENTWISE:
        out = _on_slices(func, name, args, kwargs)
    return on_wholes(func, args, kwargs) if out is NotImplemented else out


def _natively(func: Any, args: Args, kwargs: Kwargs) -> Any:
    with plain_functions():
        return func(*args, **kwargs)


def _access(func: Any, name: str, args: Args) -> Any:
    """Attributes: those made of values need a gather, the others are the whole's already."""
    attribute = func.__self__.__name__
    if name == "__get__" and attribute in ("T", "mT", "H", "mH", "real", "imag"):
        return on_wholes(func, args, {})
    if name == "__get__" and attribute == "_version":
        return args[0].num_written
    if (
        name == "__set__"
        and attribute == "grad"
        and isinstance(args[1], torch.Tensor)
        and not isinstance(args[1], Slices)
    ):
        args = (args[0], cut_like(args[1], args[0]))
    return _natively(func, args, {})


def cut_like(value: torch.Tensor, like: Slices) -> Slices:
    """This rank's slice of `value`, cut as `like`, without a graph.

    Collective unless `value` is cut like this already.

    Raises:
        ParameterError: for another shape, and for values that differ between ranks.
    """
    if isinstance(value, Slices) and value.cut.is_like(like.cut):
        return value
    if value.shape != like.shape:
        raise ParameterError(
            f"got a tensor of shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(like.shape)}."
        )
    whole = value.whole() if isinstance(value, Slices) else _plain(value.detach())
    whole = whole if whole.layout is torch.strided else whole.to_dense()
    if not isinstance(value, Slices):
        check_alike(whole, like.cut)
    return Sharded(like.cut.own(whole).to(like.device).clone(), like.cut)


def described(value: object) -> str:
    """For messages."""
    return (
        f"{tuple(value.shape)} {value.dtype}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
    )


def _plain(x: torch.Tensor) -> torch.Tensor:
    return _natively(x.as_subclass, (torch.Tensor,), {}) if isinstance(x, Window) else x


def refuse_leaf(x: torch.Tensor) -> None:
    """ParameterError if `x`, about to be changed in place, is a leaf as autograd sees it.

    In one process autograd would raise here.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise ParameterError(
            "a sharded tensor that requires grad is changed in place: do it under "
            "torch.no_grad() or on param.data."
        )


# On slices
# --------------------------------------------------------------------------------------------------


def _on_slices(func: Any, name: str, args: Args, kwargs: Kwargs) -> Any:
    """An element-wise function; NotImplemented if its operands are not cut alike."""
    tensors = tensors_of((args, kwargs))
    writes = elementwise.writes(name)
    like = args[0] if writes and args else next(x for x in tensors if isinstance(x, Slices))
    if not isinstance(like, Slices) or "out" in kwargs or not all(_fits(x, like) for x in tensors):
        return NotImplemented
    if not writes and not all(isinstance(x, Slices) for x in tensors):
        # An ordinary operand may depend on this rank's rows: the slices would be of different
        # results.
        return NotImplemented
    if writes and like.is_leaf:
        refuse_leaf(like)
    _check_operands(name, [x for x in (*args, *kwargs.values()) if x is not like], like.cut)
    own = {id(x): x.local if writes and x is like else _own(x, like) for x in tensors}
    enters_graph = writes and torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if enters_graph:  # the slice's memory is the parameter's, and stays outside
        own[id(like)] = _own(like, like).clone()
    out = _with_tensors(own, func, args, kwargs)
    if writes:
        return write_in_graph(like, out) if enters_graph else _written(like)
    for x in tensors:
        if out is own[id(x)]:
            return x  # the function had nothing to do
    if name in ("detach", "alias"):
        return like.owner.alias()
    return look_whole(out, like.cut, Sharded) if isinstance(out, torch.Tensor) else NotImplemented


def _written(like: Slices) -> Slices:
    like.mark_written()
    return like


def _check_operands(name: str, operands: Iterable[Any], cut: Cut) -> None:
    """Check that all ranks compute on slices with the same ordinary operands.

    Slices of results that differ between ranks would not be one tensor. Tensors are compared at
    once. Numbers are noted in the ledger and compared with the next collective; a number on a GPU
    is not looked at, since the host would have to wait for it.
    """
    if cut.axis.size == 1:
        return
    ordinary = [x for x in operands if isinstance(x, torch.Tensor) and not isinstance(x, Slices)]
    for x in ordinary:
        if x.numel() > 1:
            check_alike(_plain(x), cut)
    numbers = [x for x in operands if isinstance(x, int | float)]
    numbers += [x.item() for x in ordinary if x.numel() == 1 and x.device.type == "cpu"]
    if numbers:
        cut.note(f"{name} with {', '.join(map(str, numbers))}", cut.axis)


def _fits(x: torch.Tensor, like: Slices) -> bool:
    """Whether this rank has what it needs of `x`, an operand beside `like`.

    The same answer on all ranks, as it decides whether they gather: ranks that differ would hang.
    """
    if isinstance(x, Slices):
        return x.shape == like.shape
    # A 0-dim parameter is stored as a 1-D slice, which ranks higher in type promotion.
    same_dtype = like.dim() > 0 or x.dtype == like.dtype or not x.is_floating_point()
    broadcasts = x.dim() <= like.dim() and all(
        a in (1, b) for a, b in zip(reversed(x.shape), reversed(like.shape), strict=False)
    )
    return same_dtype and not x.is_sparse and broadcasts


def _own(x: torch.Tensor, like: Slices) -> torch.Tensor:
    """This rank's part of an operand, in the graph."""
    if isinstance(x, Slices):
        if not x.cut.is_like(like.cut):
            return like.cut.own(gathered(x))
        return x.differentiable_local() if x.requires_grad and torch.is_grad_enabled() else x.read()
    if x.dim() == 0:
        return _plain(x)
    return like.cut.own(_plain(x).expand(like.shape)) if x.numel() != 1 else _plain(x).reshape(1)


def _with_tensors(own: Mapping[int, Any], func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call the function with `own`, by the ids of the tensors that they replace."""
    args, kwargs = map_tensors(lambda x: own[id(x)], (args, kwargs))
    return func(*args, **kwargs)


def _on_lists(func: Any, name: str, args: Args, kwargs: Kwargs) -> Any:
    """Functions of lists of tensors, as torch's optimizers call them."""
    base = name.removeprefix("_foreach_").rstrip("_")
    if base == "norm":
        return _norms(args, kwargs)
    is_known = base in elementwise.ELEMENTWISE or name in elementwise.FUSED or name == _UNSCALE
    # The first list, to which the others correspond element by element.
    likes: Sequence[Any] = next((x for x in args if isinstance(x, list | tuple)), ())
    columns = [
        x for x in (*args, *kwargs.values()) if isinstance(x, list | tuple) and len(x) == len(likes)
    ]
    rows_fit = all(
        _fits(x, like) if isinstance(like, Slices) else not isinstance(x, Slices)
        for column in columns
        for x, like in zip(column, likes, strict=True)
        if isinstance(x, torch.Tensor)
    )
    if (
        not is_known
        or not rows_fit
        or any(x.requires_grad and torch.is_grad_enabled() for x in tensors_of((args, kwargs)))
    ):
        return NotImplemented
    keys = set(map(id, columns))
    operands: list[Any] = []  # of the sharded tensors
    for value in (*args[1:], *kwargs.values()):
        operands += (
            [x for x, like in zip(value, likes, strict=True) if isinstance(like, Slices)]
            if id(value) in keys
            else [value]
        )
    if not name.endswith("_") and any(
        isinstance(x, torch.Tensor) and not isinstance(x, Slices) for x in operands
    ):
        return NotImplemented
    first = next((x for x in likes if isinstance(x, Slices)), None)
    if first is not None and name != _UNSCALE:
        _check_operands(name, operands, first.cut)

    def own(value: Any) -> Any:
        if id(value) not in keys:
            return value
        pairs = zip(value, likes, strict=True)
        return [
            _own(x, like) if isinstance(x, torch.Tensor) and isinstance(like, Slices) else x
            for x, like in pairs
        ]

    out = func(
        *[own(value) for value in args], **{key: own(value) for key, value in kwargs.items()}
    )
    if name.endswith("_"):
        written = (
            [x for x in tensors_of(args) if isinstance(x, Slices)]
            if name in elementwise.FUSED
            else likes
        )
        for x in {id(x.owner): x for x in written if isinstance(x, Slices)}.values():
            x.mark_written()
        if name == _UNSCALE:  # an overflow is found on one rank: all must skip the step
            collectives.all_reduce_(
                args[1], "max", next(x for x in likes if isinstance(x, Slices)).cut.mesh.world
            )
        return None if out is None else likes
    return [
        look_whole(x, like.cut, Sharded) if isinstance(like, Slices) else x
        for x, like in zip(out, likes, strict=True)
    ]


_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


def _norms(args: Args, kwargs: Kwargs) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return [torch.linalg.vector_norm(x, order, dtype=kwargs.get("dtype")) for x in args[0]]


# On wholes
# --------------------------------------------------------------------------------------------------


def gathered(x: Slices) -> torch.Tensor:
    """The whole tensor, in the graph where gradients are wanted. Collective."""
    if x.requires_grad and torch.is_grad_enabled():
        return x.differentiable_whole()
    # detached: what is gathered is a view made without a graph, into which values that have one
    # could not be written
    return x.whole().detach()


def ordinary(x: torch.Tensor) -> torch.Tensor:
    """`x` itself if it is an ordinary tensor; else all of it, gathered, in the graph."""
    return gathered(x) if isinstance(x, Slices) else _plain(x)


def on_wholes(func: Any, args: Args, kwargs: Kwargs, *, same_on_all: bool = False) -> Any:
    """Any function, on gathered tensors.

    Its writes are copied back to the slices; results that share memory with a gathered tensor are
    windows.

    Args:
        same_on_all: it draws random numbers into a tensor: all ranks take rank 0's.
    """
    tensors = tensors_of((args, kwargs))
    sharded = {id(x): x for x in tensors if isinstance(x, Slices)}
    wholes = {key: x.full_tensor() if same_on_all else gathered(x) for key, x in sharded.items()}
    # Functions of lists do not increase version counters.
    writes_lists = getattr(func, "__name__", "").startswith(
        ("_foreach_", "_fused_", "_amp_")
    ) and func.__name__.endswith("_")
    before = {key: -1 if writes_lists else whole._version for key, whole in wholes.items()}
    own = {id(x): wholes.get(id(x), x) for x in tensors}
    out = _with_tensors(own, func, args, kwargs)
    uncounted = set(map(id, written_uncounted(func, args, kwargs)))
    for key, whole in wholes.items():
        if whole._version != before[key] or key in uncounted:
            refuse_leaf(sharded[key])
            if same_on_all:
                # Ranks may have different random states: each would keep a slice of other draws.
                collectives.broadcast_(whole, 0, sharded[key].cut.mesh.world)
                sharded[key].take_same(whole.detach())
            elif whole.grad_fn is not None:
                sharded[key].take_whole_in_graph(whole)
            else:  # `nn.init.eye_` makes it a leaf that requires grad
                sharded[key].take_whole(whole.detach())
    return map_tensors(functools.partial(_as_result, sharded, wholes), out)


def _as_result(
    sharded: Mapping[int, Slices], wholes: Mapping[int, torch.Tensor], out: torch.Tensor
) -> torch.Tensor:
    for key, whole in wholes.items():
        if out is whole:
            return sharded[key]
        if not isinstance(out, Slices) and shares_memory(out, whole):
            return Window.onto(_plain(out), WindowSource(whole, sharded[key]))
    return out


# Functions that are none of these
# --------------------------------------------------------------------------------------------------


def _norm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given = {
        **dict(zip(("x", "order", "dim", "keepdim", "out", "dtype"), args, strict=False)),
        **kwargs,
    }
    x, order = given.get("x"), given.get("order", given.get("p", given.get("ord")))
    if (
        not isinstance(x, Slices)
        or (x.requires_grad and torch.is_grad_enabled())
        or not x.is_floating_point()
    ):
        return NotImplemented
    if given.get("keepdim") or any(given.get(key) is not None for key in ("dim", "out", "dtype")):
        return NotImplemented
    if order is None or order == "fro":
        return norm(x, 2.0)
    # Of these orders the norm of the slices' norms is that of the whole.
    is_of_vector = isinstance(order, int | float) and order > 0
    of_matrix = func.__name__ == "linalg_norm" and x.dim() == 2
    return norm(x, float(order)) if is_of_vector and not of_matrix else NotImplemented


def _sum(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0] if args else None
    if len(args) != 1 or kwargs or not isinstance(x, Slices) or not x.is_floating_point():
        return NotImplemented
    return total(x) if func.__name__ == "sum" else total(x) / x.cut.whole_shape.numel()


def _shaped_like(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Only shape, dtype and device of the sharded tensor are needed: nothing is gathered."""
    if func.__name__.startswith("new_") or not isinstance(args[0], Slices):
        own = dict[int, Any]()
        for x in tensors_of((args, kwargs)):
            own[id(x)] = x
            if isinstance(x, Slices):
                own[id(x)] = torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)
        return _with_tensors(own, func, args, kwargs)
    return NotImplemented


def _drawn(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Random numbers made of a sharded tensor: rank 0's, as ranks may have different states."""
    out = on_wholes(func, args, kwargs)
    if isinstance(out, torch.Tensor) and not out.requires_grad:
        mesh = next(x for x in tensors_of((args, kwargs)) if isinstance(x, Slices)).cut.mesh
        collectives.broadcast_(out, 0, mesh.world)
    return out


def _initial(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function of torch.nn.init."""
    with torch.no_grad():
        return on_wholes(func, args, kwargs, same_on_all=True)


def _flat(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Flattening a 1-D tensor changes nothing."""
    x = args[0] if args else None
    is_flat = (
        isinstance(x, Slices) and x.dim() == 1 and args[1:] in ((), (-1,), ((-1,),)) and not kwargs
    )
    return x if is_flat else NotImplemented


def _as_itself(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`x.view_as(x)`, with which programs find the AccumulateGrad node of a leaf to hook it.

    That node of a sharded leaf never runs.

    Raises:
        ParameterError: for such a leaf.
    """
    x = args[0]
    if (
        len(args) == 2
        and x is args[1]
        and x.is_leaf
        and x.requires_grad
        and torch.is_grad_enabled()
    ):
        raise ParameterError(
            f"{func.__name__} of a sharded parameter with itself: hooks of its graph node would "
            "never be called. Use param.register_hook, which is given the gradient, or "
            "param.register_post_accumulate_grad_hook."
        )
    return NotImplemented


def _embedding(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """With `max_norm` the rows that any rank looks up are shortened before, in the slices."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type")
    if func is torch.nn.functional.embedding_bag:
        names = ("input", "weight", "offsets", "max_norm", "norm_type")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    weight, max_norm = given.get("weight"), given.get("max_norm")
    if (
        max_norm is None
        or not isinstance(weight, Slices)
        or not isinstance(given.get("input"), torch.Tensor)
    ):
        return NotImplemented
    is_read = torch.zeros(weight.shape[0], device=weight.device)
    is_read[given["input"].flatten()] = 1
    collectives.all_reduce_(is_read, "max", weight.cut.axis)
    with torch.no_grad():
        torch.embedding_renorm_(
            weight, is_read.nonzero().flatten(), max_norm, given.get("norm_type", 2.0)
        )
    place = names.index("max_norm")
    args = (*args[:place], None, *args[place + 1 :]) if len(args) > place else args
    return on_wholes(func, args, {key: value for key, value in kwargs.items() if key != "max_norm"})


_SPECIAL: dict[str, Callable[[Any, Args, Kwargs], Any]] = {
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm", "vector_norm"), _norm),
    **dict.fromkeys(("sum", "mean"), _sum),
    **dict.fromkeys(elementwise.SHAPED_LIKE, _shaped_like),
    **dict.fromkeys(elementwise.RANDOM, functools.partial(on_wholes, same_on_all=True)),
    **dict.fromkeys(elementwise.DRAWN, _drawn),
    **dict.fromkeys(("reshape", "view", "flatten", "ravel"), _flat),
    **{
        name: _initial
        for name in vars(torch.nn.init)
        if name.endswith("_") and not name.startswith("_")
    },
    **dict.fromkeys(("embedding", "embedding_bag"), _embedding),
    **dict.fromkeys(("view_as", "expand_as"), _as_itself),
    **dict.fromkeys(
        ("numpy", "__array__"), lambda func, args, kwargs: as_copy(on_wholes(func, args, kwargs))
    ),
}


def _of_script(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(script: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Slices) for x in tensors_of((args, kwargs))):
            return on_wholes(call, (script, *args), kwargs)
        return call(script, *args, **kwargs)

    return run


# A script given slices would fuse operators into kernels that read their memory.
for _kind in SCRIPTED:
    _kind.__call__ = _of_script(_kind.__call__)
