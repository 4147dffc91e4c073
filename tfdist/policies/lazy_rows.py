# SPDX-License-Identifier: Apache-2.0
"""LazyRows: an update touches only the rows of a table that the step has looked up."""

from __future__ import annotations

from tfdist.policies import base


class LazyRows(base.Policy):
    """Updates only the rows of an embedding table, and of its slots, that have a gradient in this update.

    A dense optimizer such as Adam changes each element of a variable in each update. Its slots decay also where the
    gradient is 0, by m <- b1 m + (1 - b1) g. With this policy rows without a gradient keep their value and their slots;
    the others are updated by the optimizer's own formula. So an update takes time in proportion to the rows of the
    step, and not to those of the table. Source: `tf.contrib.opt.LazyAdamOptimizer` of TensorFlow 1.

    Where each row has a gradient in each update, and for SGD without momentum and Adagrad always, this is the dense
    update. It holds for SGD, Adam, AdamW, Adamax, Nadam, Adagrad, Adadelta, Ftrl, RMSprop and Lion; a weight decay is
    applied to the whole table nevertheless.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
