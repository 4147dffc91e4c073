# SPDX-License-Identifier: Apache-2.0
"""Calls of a Keras model: `fit`, `evaluate`, `predict` and the methods of one batch, from their beginning to their end.

Keras tells a strategy neither which model is in which of its loops, nor with which callbacks. So the six public methods
are wrapped, once in a process and for good. All models inherit them from one class, for which Keras exports no name. A
call is open from before its first line until it has returned or raised; a strategy may raise another exception than an
operation has. Calls nest: `fit` evaluates, and a callback may call anything. The two objects by which `fit` counts its
steps are made within it, and join its call when they are.

A program says that a model is to have no strategy by `with tf.distribute.get_strategy().scope():`. TensorFlow lets that
scope leave no trace, so it is wrapped as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.utils import traceback_utils

from tfdist.compat import patching
from tfdist.compat.keras import layers
from tfdist.compat.tensorflow import replicas

NEEDS = (
    "keras.src.backend.tensorflow.trainer:TFEpochIterator",
    "keras.src.utils.traceback_utils:filter_traceback",
    "keras:Model._initial_epoch",
)

# The class that has `fit`: all models inherit it, and so may layers. Keras exports no name for it.
TRAINER: Any = next(base for base in keras.Model.__mro__ if "fit" in vars(base))

# The class of Keras' iterators over epochs, of any backend.
EPOCHS: Any = TFEpochIterator.__base__

_SAVERS = keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore
_KINDS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_EXPLAINED = "_tfdist_explained"
_made_in_default: weakref.WeakSet[Any] = weakref.WeakSet()


class Listeners:
    """Bound methods that are called as long as their owners live."""

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[..., None]]] = []

    def add(self, method: Callable[..., None]) -> None:
        """Adds a bound method; its owner is not kept alive."""
        self._methods.append(weakref.WeakMethod(method))

    def call(self, *args: Any) -> None:
        """Calls each method; one may raise, and then those after it are not called."""
        for reference in [*self._methods]:
            method = reference()
            if method is None:
                # Another thread may have removed it.
                with contextlib.suppress(ValueError):
                    self._methods.remove(reference)
            else:
                method(*args)


_listeners = Listeners()


class _Thread(threading.local):
    """State of a thread.

    Attributes:
      default_scopes: number of scopes of the default strategy that it is in.
      making: Keras' iterator over epochs that it makes, or None.
      outside: the last such iterator that it made in no call, weakly.
    """

    default_scopes = 0
    making: Any = None
    outside: Callable[[], Any] = staticmethod(lambda: None)


_thread = _Thread()


# The open calls of each thread, by its identity, the innermost one last.
_open: dict[int, list[Call]] = {}
_overlaps = threading.Lock()


@dataclasses.dataclass(eq=False)
class Call:
    """A call of a model's method, from its beginning to its end.

    Attributes:
      model: the model.
      kind: name of the method, such as "fit".
      thread: the thread that made it.
      callbacks: Keras' list of the callbacks, once it is made; before, what the user gave to `fit`, or None.
      epochs: Keras' iterator over the epochs, once it is made; a weak reference in a call that was opened late.
      under: the strategy whose loops it is one of, once that has looked for others beside it.
      ends: called when the call has raised, with the exception.
      after: called when the call has ended, however it did.
      arguments: the user's arguments, by name; the method is called with these.
      around: entered around the method.
      change: called with what the method returns; its own result is returned.
      is_compared: true once the workers have compared it.
    """

    model: Any
    kind: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    around: contextlib.AbstractContextManager = dataclasses.field(default_factory=contextlib.nullcontext)
    change: Callable[[Any], Any] | None = None
    is_compared: bool = False
    thread: threading.Thread = dataclasses.field(default_factory=threading.current_thread)
    callbacks: Any = None
    epochs: Any = None
    under: Any = None
    ends: list[Callable[[BaseException], None]] = dataclasses.field(default_factory=list)
    after: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    @property
    def each_callback(self) -> list[Any]:
        """The callbacks, out of the lists that they are in."""
        return keras.tree.flatten(getattr(self.callbacks, "callbacks", self.callbacks))

    @property
    def follows_batches(self) -> bool:
        """True if a callback may need the logs of each batch, or write variables before it.

        Not Keras' progress bar, nor what it saves after an epoch, and none whose class says `follows_batches = False`.
        """
        found, base = self.callbacks or self.arguments.get("callbacks") or [], keras.callbacks.Callback
        kind = "train" if self.trains else "test"
        hooks = [f"on_{each}_{when}" for each in (f"{kind}_batch", "batch") for when in ("begin", "end")]
        # `LambdaCallback` has its functions as attributes.
        return any(
            (hook in vars(each) or getattr(type(each), hook, None) is not getattr(base, hook))
            and getattr(each, "follows_batches", True)
            and not (type(each) in _SAVERS and each.save_freq == "epoch")
            for each in keras.tree.flatten(getattr(found, "callbacks", found))
            if type(each) is not keras.callbacks.ProgbarLogger
            for hook in hooks
        )

    @property
    def trains(self) -> bool:
        """True for `fit` and `train_on_batch`."""
        return self.kind in ("fit", "train_on_batch")

    @property
    def predicts(self) -> bool:
        """True for `predict` and `predict_on_batch`."""
        return self.kind.startswith("predict")

    @property
    def name(self) -> str:
        """As users write it, such as "model.fit"."""
        return f"model.{self.kind}"

    @property
    def strategy(self) -> Any:
        """The strategy that the model runs under: of the scope it was made in, else the current one.

        None if nothing was chosen; the default strategy only if the model was made, or is called, in its scope.
        """
        strategy, default = self.model.distribute_strategy, replicas.default_strategy()
        is_chosen = strategy is not default or self.model in _made_in_default or _thread.default_scopes > 0
        return strategy if is_chosen else None


def current(thread: threading.Thread | None = None) -> Call | None:
    """The innermost open call of a thread, by default of this one; or None."""
    calls = _open.get(threading.get_ident() if thread is None else thread.ident or 0)
    return calls[-1] if calls else None


def name(thread: threading.Thread | None = None) -> str:
    """The name of that call as users write it, such as "model.fit"; "" for none."""
    found = current(thread)
    return "" if found is None else found.name


def iterating_fit() -> Call | None:
    """The `fit` that iterates in this thread, or None if another loop does, such as the validation within it."""
    for call in reversed(_open.get(threading.get_ident(), ())):
        if call.kind in ("fit", "evaluate", "predict"):
            return call if call.kind == "fit" else None
    return None


def fit_of(model: keras.Model) -> Call | None:
    """The innermost open `fit` of this model in this thread, also while it validates; or None."""
    calls = _open.get(threading.get_ident(), ())
    return next((call for call in reversed(calls) if call.kind == "fit" and call.model is model), None)


def is_within_fit(call: Call) -> bool:
    """True if an open call was made within a `fit`, by a callback."""
    calls = _open.get(threading.get_ident(), [])
    return any(each.kind == "fit" for each in calls[: calls.index(call)])


def epochs_being_made() -> Any:
    """Keras' iterator over epochs that is being made in this thread, and asks for its data; or None."""
    return _thread.making


def first_epoch_of(model: keras.Model) -> int | None:
    """The epoch that the next `fit` of a model begins with, if it was set; a callback may set it for a running one."""
    return getattr(model, "_initial_epoch", None)


def begin_with_epoch(model: keras.Model, epoch: int | None) -> None:
    """Sets that epoch."""
    model._initial_epoch = epoch


def follow() -> None:
    """From now on calls are known, also of models of no strategy: for callbacks that ask for theirs."""
    for kind in _KINDS:
        # A program may have put a function of its own in the method's place, of any name and signature.
        ours = (vars(base).get(kind) for base in keras.Model.__mro__)
        stock = next(each for each in ours if getattr(each, "__module__", "").startswith("keras."))
        _, *names = inspect.signature(stock).parameters
        # Keras' own function shortens what is raised within it; outside of it, this one is.
        patching.once(TRAINER, kind, _opening, kind, names, decorate=traceback_utils.filter_traceback)
    patching.once(TFEpochIterator, "__init__", _joining_epochs)
    patching.once(keras.callbacks.CallbackList, "__init__", _joining_callbacks)


def before_each(begin: Callable[[Call], None]) -> None:
    """Calls `begin(call)` before each call of a model of this process, as long as its owner lives.

    Args:
      begin: a bound method of a strategy. An exception that it raises ends the call before it has any effect.
    """
    follow()
    default = replicas.default_strategy()
    if patching.get(default, "scope") is None:
        patching.put(default, "scope", functools.partial(_entering, default))
    layers.after_making(_note_making)
    _listeners.add(begin)


@contextlib.contextmanager
def _entering(default: Any) -> Iterator[Any]:
    with type(default).scope(default) as strategy:
        _thread.default_scopes += 1
        try:
            yield strategy
        finally:
            _thread.default_scopes -= 1


def _note_making(layer: keras.Layer) -> None:
    if _thread.default_scopes:
        _made_in_default.add(layer)


def _opening(original: Any, kind: str, names: Sequence[str], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    arguments = dict(zip(names, args, strict=False))
    if len(args) > len(names) or arguments.keys() & kwargs.keys():
        return original(self, *args, **kwargs)  # Python refuses them.
    call = Call(self, kind, {**arguments, **kwargs})
    if kind == "fit":
        own = _callbacks_of(call)
        if _added and own is not None:
            add_callback(call, *_added[0](self, own))
        call.callbacks = call.arguments.get("callbacks")
    _listeners.call(call)
    _begin(call)
    try:
        # By position and by name as they came.
        given = {**call.arguments}
        first = [given.pop(name) for name in names[: len(args)]]
        with call.around:
            result = original(self, *first, **given)
        return result if call.change is None else call.change(result)
    except BaseException as error:
        raised = _explained(self.distribute_strategy, error)
        for end in call.ends:
            end(raised)
        if raised is not error:
            raise raised from None
        raise
    finally:
        _end(call)


def _begin(call: Call) -> None:
    _open.setdefault(call.thread.ident or 0, []).append(call)


def _end(call: Call) -> None:
    """Closes a call; a second time does nothing."""
    thread = call.thread.ident or 0
    calls = _open.get(thread, [])
    is_open = call in calls
    if is_open:
        calls.remove(call)
    if not calls:
        _open.pop(thread, None)
    for each in call.after if is_open else ():
        each()


# Given a model and the callbacks of a `fit`, returns those to add.
Added = Callable[[Any, Sequence[Any]], Sequence[Any]]
_added: list[Added] = []


def add_to_fit(added: Added) -> None:
    """From now on each `fit` of this process has these callbacks, too; a second call replaces the first."""
    _added[:] = [added]
    follow()


def add_callback(call: Call, *callbacks: Any) -> None:
    """Adds callbacks to those of a `fit` that is about to begin, unless they are a `CallbackList` of the user's own."""
    own = _callbacks_of(call)
    if own is not None:
        call.callbacks = call.arguments["callbacks"] = [*own, *callbacks]


def _callbacks_of(call: Call) -> Sequence[Any] | None:
    given = call.arguments.get("callbacks")
    if isinstance(given, keras.callbacks.CallbackList):
        return None
    return given if isinstance(given, list | tuple) else [given] if given else []


def _explained(strategy: Any, error: BaseException) -> BaseException:
    """The exception that the strategy raises in place of an operation's, or the same one."""
    explain = getattr(strategy, "explained", None)
    # The error of a nested call has been explained.
    if explain is None or not isinstance(error, tf.errors.OpError) or hasattr(error, _EXPLAINED):
        return error
    raised = explain(error) or error
    setattr(raised, _EXPLAINED, True)
    return raised


def _joining_epochs(original: Any, self: Any, /, *args: Any, **kwargs: Any) -> None:
    call, outer = current(), _thread.making
    # `fit` makes that of its validation, too.
    if call is not None and call.epochs is None:
        call.epochs = self
    if call is None:
        _thread.outside = weakref.ref(self)
    _thread.making = self
    try:
        original(self, *args, **kwargs)
    finally:
        _thread.making = outer


# Called with the model, the callbacks, and their parameters, before Keras' list of callbacks is made of these.
Prepare = Callable[[Any, Sequence[Any], dict[str, Any]], object]
_preparing: list[Prepare] = []


def before_callbacks(prepare: Prepare) -> None:
    """Calls `prepare` for each list of callbacks of this process; it may change the parameters."""
    if prepare not in _preparing:
        _preparing.append(prepare)
    follow()


def _joining_callbacks(original: Any, self: Any, /, *args: Any, **kwargs: Any) -> None:
    _, *names = inspect.signature(original).parameters
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for prepare in _preparing:
        prepare(given.get("model"), keras.tree.flatten(given.get("callbacks") or []), kwargs)
    original(self, *args, **kwargs)
    call = current()
    is_list = call is not None and isinstance(call.callbacks, keras.callbacks.CallbackList)
    if call is not None and not is_list and getattr(self, "model", None) is call.model:
        call.callbacks = self
    if call is None and given.get("add_history"):
        _open_late(self, given.get("model"))


def _open_late(callbacks: Any, model: Any) -> None:
    """Opens the call of a `fit` that had begun, or that Python had looked up, before its method was wrapped.

    `model.fit(x, y, callbacks=[Resume("checkpoints")])` looks up the method first. Such a call ends with
    `on_train_end`; if it raises, with its iterator over the epochs.
    """
    epochs, _thread.outside = _thread.outside(), lambda: None
    if model is None or epochs is None:
        return
    call = Call(model, "fit", callbacks=callbacks, epochs=weakref.ref(epochs))
    _begin(call)
    end = weakref.finalize(epochs, _end, call)
    end.atexit = False
    on_train_end = callbacks.on_train_end

    def ending(logs: Any = None) -> None:
        on_train_end(logs)
        end()

    patching.put(callbacks, "on_train_end", ending)


def refuse_overlap(strategy: Any, is_exclusive: bool, nests: bool = True) -> None:
    """Refuses the call that is open in this thread if it overlaps with others that share its counts.

    Args:
      strategy: the strategy that the call runs under.
      is_exclusive: whether the strategy's loops share more than their models: no two threads may be in one then.
        Otherwise two threads may not train or evaluate the same model, and on several replicas no two models: a sum
        over the replicas hangs now and then while another thread makes one.
      nests: whether `fit` may be called within a callback of another `fit`.

    Raises:
      RuntimeError: it overlaps with another call.
    """
    call = current()
    if call is None:
        return
    with _overlaps:
        beside = [each for calls in [*_open.values()] for each in [*calls] if each.under is strategy]
        for known in beside:
            if known is call:
                continue
            if known.thread is call.thread:
                if not nests and known.kind == call.kind == "fit":
                    raise RuntimeError(
                        f"{_label(call)} is called within a callback of {_label(known)}, and the policies of this "
                        f"{type(strategy).__name__} can't leave a pass over the data and come back to it; begin it "
                        "when the other has ended, or train a model of another strategy there. Received: fit within fit"
                    )
            elif reason := _reason(call, known, strategy, is_exclusive):
                raise RuntimeError(
                    f"{_label(call)} overlaps with another thread's call, and {reason}; begin it when the other has "
                    f"ended, or run it in another process. Received: a call in thread {call.thread.name!r} during "
                    f"{_label(known)} in thread {known.thread.name!r}"
                )
        call.under = strategy


def _reason(call: Call, known: Call, strategy: Any, is_exclusive: bool) -> str:
    """Returns why two calls in two threads may not overlap; "" if they may."""
    kind = type(strategy).__name__
    if is_exclusive:
        return f"under this {kind} the loops of all models share one engine, or the order of collectives"
    # `predict` neither trains nor writes metrics.
    if known.predicts or call.predicts:
        return ""
    if known.model is call.model:
        return "both would write the same metrics and counts"
    if strategy.num_replicas_in_sync > 1:
        return f"under this {kind} TensorFlow's sums over the replicas can hang beside those of another thread"
    return ""


def _label(call: Call) -> str:
    return f"{call.kind} of model {getattr(call.model, 'name', None)!r}"


# The functions that Keras calls for each execution of its loops, which it makes of a model's steps.
#
# Keras makes them to call `strategy.run` within a `tf.function`. A strategy whose engine runs Python in each step gives
# a function of its own instead. So no graph has to call Python, and exceptions are Python's own. There is no public way
# to give one, so `make_train_function`, `make_test_function` and `make_predict_function` are replaced, once in a
# process. A model that overrides them, and doesn't call the inherited ones, keeps what it makes.


def ask_strategies(*kinds: str) -> None:
    """From now on Keras asks `function_of` of a model's strategy, if it has one, for its functions of these kinds.

    It is called with the model, "train", "test" or "predict", and the function that Keras has made. What it returns
    makes an execution: of an iterator, whose logs it returns, or for "predict" of a list of batches.
    """
    for kind in kinds:
        patching.once(TRAINER, f"make_{kind}_function", _making, f"{kind}_function", kind)


# A program may have put a function of its own in the method's place, of any name and signature.
def _making(original: Callable[..., Any], name: str, kind: str, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    before = getattr(self, name)
    made = original(self, *args, **kwargs)
    function_of, function = getattr(self.distribute_strategy, "function_of", None), getattr(self, name)
    if function_of is not None and function is not None and function is not before:
        setattr(self, name, function_of(self, kind, function))
    return made
