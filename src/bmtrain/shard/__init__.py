"""Sharded parameters: one training step, who holds which memory, and who waits for whom.

A *rank* is one process, an *axis* a group of ranks. A *collective* is an operation that every rank
of an axis must start, all in the same order. A `Storage` (not torch's) is a flat array of
parameters of one dtype and one *placement*: which ranks have the array. Each rank of its axis keeps
one equal part, the *shard*. The *full buffer* is the whole array on one rank; a *view* is one
parameter in it. A *gather* fills the full buffer from all shards. A *reduction* sums full gradients
over the ranks and leaves each rank the part that matches its shard; a storage's `Gradient` keeps
that part. A `Residence` manages the full buffer of a storage: `prefetch` starts the gather unless
it has been started, `acquire` waits for it, `release` drops the buffer when its last holder lets
go. A `Use` is one call of a module: it holds full buffers while that call may read them, and lives
as long as the call's autograd graph. A *pass* is one forward or one backward of the model: a
storage that is met again, or another grad mode, begins the next forward pass, which shares no
buffer with the one before. If the axis has one rank, the shard is the full buffer and nothing is
communicated.

Forward, `block(x)`:

1. `Block._forward` makes a `Use`. `Use.gather_in_graph` gets each full buffer from
   `Engine.acquire`, which also prefetches: it starts the gather that followed this one in earlier
   passes (`Schedule`).
2. `Unshard.apply` makes the trainable views outputs of one autograd node. `Binding.running` puts
   all views in the place of the module's parameters while the module runs.
3. `tied_to` adds a path from the outputs to that node if there is none. A rank without one
   would skip the collectives of backward, and the other ranks would hang.
4. `Use.running` ends. ZeRO-3 releases the buffers, ZeRO-2 holds them until backward is done with
   them; without gradients both release. If the block is recomputed, its arguments are all that is
   kept of the run. Otherwise saved tensors are, but for those that lie in a buffer that is gathered
   again: of these the position (`Packed`).

Backward, in the order in which autograd comes to it:

5. A hook on the outputs calls `Use.lend`: it gathers again under ZeRO-3, and puts full tensors into
   the module until step 7, for Python code that runs in backward (hooks, inner checkpoints). To
   autograd these are the views of forward. `Backward.begin_use` first releases what later calls
   hold if all of their parameters are frozen: they never come to step 7.
6. If the block is recomputed, the first saved tensor that autograd asks for runs the module again
   (`recompute/`) on these tensors, with the buffers, attributes and random state of its first run.
   Only what this run saves is used. A call that cannot be repeated keeps its activations instead.
   If the program has changed something that the first run read and that cannot be restored,
   backward raises RecomputationError.
7. `Unshard.backward` gets the gradients of all views. `Use.end` takes the loan back, releases the
   buffers, so that the flat gradient can have their memory, and calls `Backward.add`, which starts
   the reductions or, while gradients are deferred, keeps full gradients on this rank.
8. After the last node `Backward.finish` lets the hosts agree on which parameters got a gradient on
   any rank, waits for the reductions, and shows the sums in `.grad` (`Gradient.close`).
   `Replicated` sums the gradients of parameters that no storage has. Then `Engine.forget_gathered`
   drops all full buffers, because shards may be written now.

Update: `Steps` enters the step in the ledger, and the optimizer writes each rank's shards. An older
graph, whose uses know the shards' versions, cannot run backward any more, nor can a view that the
program has kept be read (StaleParameterError): these are the old values.

On a GPU the compute, gather and reduce streams wait for each other by events, the host does not:

* A gather waits for the compute stream, which may still write the shard or read the memory that the
  new buffer got. By peer copies it also waits for all ranks, before and after it copies.
* The compute stream waits for a gather before a module reads the buffer or its memory is reused.
* A reduction waits for the compute stream, which computes the gradients.
* Before a reduction starts, the compute stream waits until the one before has copied its gradients,
  and for the older of two in flight: the allocator may reuse their memory.
* The compute stream waits for all reductions before `.grad` is shown: it would be a partial sum.
* A gather waits for an optimizer's update that is still under way (`Residence.wait_for_updates`).

On a CPU there are no streams: each collective blocks the host, and a prefetch overlaps nothing.

If forward raises, the module gets its parameters back. If backward raises, autograd drops the
call of `finish`; the next gather, gradient, step or `zero_grad` calls `Backward.abandon`, which
drops the pass and communicates nothing, since other ranks may not have failed.

No choice between collectives may depend on what differs between ranks, such as versions or live
objects; a check of versions may only raise. The `Ledger` names every collective and compares the
names between ranks: on a CPU in each one, on a GPU in step 8 and once per forward pass, in the
background. If they differ, all ranks raise.
"""
