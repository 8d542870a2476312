"""Sharded parameters: the spine of the engine.

One step of training, in the words of this package.

A `Storage` holds parameters of one dtype and one placement, flattened one after the other. Each
rank of its `axis` keeps an equal part, the *shard*. A `Block` runs a module; its parameters lie in
few storages.

Forward, `block(x)`:

1. The block makes a `Use`, the record of this call. It lives as long as the autograd graph of the
   call and serves forward, recomputation and backward.
2. `Use.open` asks the `Engine` for the full buffer of each storage (`Engine.acquire`). If it is
   not resident or in flight, the `Residence` of the storage allocates a buffer and the `Transport`
   starts the *gather* that fills it from all shards. Then the engine starts the gather that came
   next in the last pass (`Schedule`): it runs beside this block.
3. `Unshard.apply` makes views of the buffer, one per parameter, that belong to the graph but are
   no leaves. A `Binding` puts them in the place of the parameters while the module runs.
4. Under ZeRO-3 the use releases the buffer: its memory goes back to the allocator. What autograd
   has saved of it is kept as a place in the buffer (`Packed`), not as a view. Under ZeRO-2 it
   stays.
5. Outputs are *tied* to the graph (`outputs.tied_to`), so that backward reaches the call on every
   rank.

Backward:

6. Before the first node of the call runs, `Use.lend` acquires the buffers again and lends full
   tensors to the module, for hooks and checkpoints whose Python code runs in backward. A
   recomputed block runs its module again (`recompute/recomputation.py`).
7. `Unshard.backward` has the gradients of all parameters of the call: it releases the buffers and
   hands the gradients to `Backward.add`. Each storage's `Gradient` starts a *reduction*: the sum
   over ranks, of which each rank gets the part of its shard.
8. When autograd has run its last node, `Backward.finish` lets the ranks agree on which parameters
   got a gradient, waits for the reductions and shows the sums in `.grad` (`Gradient.close`).

Then an optimizer updates shards, element by element. `Steps` checks that all ranks take the same
step.

Who waits for whom:

* A gather waits for all that was issued on the compute stream before it: for writes of the shard,
  and for the last reader of the memory that the allocator has handed out again.
* The compute stream waits for a gather before the module reads the buffer.
* A reduction waits for the compute stream, which computes what it reads. At most two are in
  flight; the compute stream waits for the oldest before its memory is dropped.
* The compute stream waits for all reductions before `.grad` is shown.
* On a CPU these waits do nothing: work is done in the order of the program.

Collectives must come in the same order on all ranks. So nothing on this path decides by what can
differ between ranks: versions of parameters, or which Python objects are alive. The `Ledger` has a
name for each of them and compares.

Beside the spine: `parameter.py`, `slices.py`, `sharded.py` and `elementwise.py` are parameters as
programs see them, `replicated.py` the parameters that are whole on every rank.
"""
