# SPDX-License-Identifier: Apache-2.0
"""The engine of `Warmup` under the mirrored strategies: the first replica trains alone, then gives all its state.

An update of the phase, on the process of the first replica and on another one:

    next(iterator): a handle of the batch              a handle of no data; the batch is skipped, read later or never
    train_step on one part of the batch, as one        nothing: the logs are zeros
    device would, on the first copy of the variables
    ...                                                ...
    the epoch ends, or the phase does: `meet`  <---->  `meet`: waits, however long that takes
    gives its variables  --------------------------->  takes them

So processes that wait run through the steps of the phase at once, and then wait, alive, where all need the same state:
at the end of each epoch, before metrics are read, the model is evaluated and callbacks decide.

Data. `fit` iterates over a `_WarmupDataset`, anybody else over the data set that the strategy makes without a phase.
A pass that begins in the phase reads the same elements by its own tf.data iterators (`data.Batches`), and goes on with
them after it: through `rest` of that data set if its engine has one, else in steps of all replicas. Later passes are
the strategy's own.

Who owns what. `Warmup` owns the count of updates or epochs, and says how many replicas take part: the form of a handle.
The engine owns one fact, which model is ahead; `meet` alone changes that back. Keras owns the iterator, and that its
pass. Nothing needs to be undone when the phase ends: its hook on the end of an epoch lasts for that epoch.
"""
