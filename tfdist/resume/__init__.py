# SPDX-License-Identifier: Apache-2.0
"""Checkpoints exact to the step: training resumes after a crash, a preemption or a restart of the whole job.

    fit's thread                                        the directory (the chief's)
      on_train_begin    restores the newest          <---  step-0000000120/
                        checkpoint
        variables, optimizers, policies, position in the data
      ...               steps 121, 122, ...
      on_train_batch_end, on_epoch_end
                        every `save_freq`            --->  step-0000000140/, complete or not at all
      SIGTERM           noted by the handler
      on_train_batch_end, of the same step on all workers
                        saves                        --->  step-0000000147/
                        ends the process with code 75, after which launchers start it again

Modules: `checkpoint` reads and writes the directory, collects and assigns a model's variables, and saves and restores
the position of `fit` in its data, by way of `compat.keras.fit`. `preemption` handles the signal and the messages
between workers about it. `callback` is the public callback, which combines the others. Strategies provide the rest:
the state of their policies, and data sets that begin in the middle (`tfdist.passes.progress`).
"""

from tfdist.compat import versions

# Before its modules import what a new version of TensorFlow or Keras may have taken away.
versions.check()
