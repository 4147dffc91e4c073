# SPDX-License-Identifier: Apache-2.0
"""Training that goes on where it was: after a crash, a preemption or a restart of the whole job.

    fit's thread                                        the directory (the chief's)
      on_train_begin    takes the newest checkpoint  <---  step-0000000120/
        variables, optimizers, policies, position in the data
      ...               steps 121, 122, ...
      on_train_batch_end, on_epoch_end
                        every `save_freq`            --->  step-0000000140/, whole or not at all
      SIGTERM           noted by the handler
      on_train_batch_end, of the same step on all workers
                        saves                        --->  step-0000000147/
                        ends the process with code 75, after which launchers start it again

Who owns what: `checkpoint` owns the directory and knows nothing of models; `position` owns where `fit` is in its data,
and is the one place that reaches into Keras' loop; `preemption` owns the signal and what workers tell each other of it;
`callback` is what users have, and brings them together. What a strategy has to save besides variables, and how its data
are begun in the middle, strategies tell through `tfdist.engines.progress`.
"""
