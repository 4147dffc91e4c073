# SPDX-License-Identifier: Apache-2.0
"""The engine of `Warmup` under the mirrored strategies: the first replica trains alone, then gives all its state.

An update of the phase, on the process of the first replica and on another one:

    next(iterator): a handle of the batch              a handle of no data: the batch is read later, or never
    train_step on one part of the batch, as one        nothing: the logs are zeros
    device would, on the first copy of the variables
    ...                                                ...
    the epoch ends, or the phase does: `meet`  <---->  `meet`: waits, however long that takes
    gives its variables  --------------------------->  takes them

So processes that wait run through the steps of the phase at once, and then wait, alive, where all need the same state:
at the end of each epoch, before metrics are read, the model is evaluated and callbacks decide.

Data: `fit` iterates over a `data.WarmupDataset`; every other loop over the data set that the strategy makes without a
phase. A `data.Pass` that begins in the phase reads with iterators of its own. After the phase its rest is made by the
engine that decides about updates then, which takes these iterators over (`CountedDataset.rest`), or in synchronous
steps. Passes that begin after the phase are the strategy's own.

Ownership: `Warmup` counts updates or epochs, and says how many replicas take part in each. The engine holds one fact,
which model is ahead: an update that one replica makes sets it, and `meet` alone clears it. It hears of the end of an
epoch by a hook that removes itself, and of its beginning by that hook and by `fit`'s list of callbacks.
"""
