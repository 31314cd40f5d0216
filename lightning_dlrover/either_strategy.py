"""A strategy for Trainers of `lightning` and of `pytorch_lightning`.

This module decides which package's `DDPStrategy` is behind an instance. `strategy.py` holds the strategy itself.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_dlrover.packages import default_package, on_import, package_of, release, submodule

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy
    from typing_extensions import Self
else:
    DDPStrategy = object  # `_concrete` brings in a package's own

__all__ = ["EitherStrategy"]


class EitherStrategy(DDPStrategy):
    """Base of strategies that inherit, through `super()`, from the `DDPStrategy` of the Trainer's own package.

    An instance belongs to a subclass that has the `DDPStrategy` of one package behind it: the package that is imported when
    the instance is made. When a Trainer of the other package takes the instance, its class changes. Attributes are alike in
    both.

    `__new__` is defined here because jsonargparse would take the `__new__` of the class itself as the signature of the user's
    settings.
    """

    _package: ClassVar[str] = ""  # set on concrete classes only

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return super().__new__(cls if cls._package else _concrete(cls, default_package()))

    @property
    def accelerator(self) -> Any:
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        """The first access of a Trainer to its strategy, which reveals the Trainer's package."""
        if accelerator is not None:
            self._serve(package_of(accelerator))
        self._accelerator = accelerator

    def _serve(self, package: str) -> None:
        """Become a strategy of the Trainer's own package."""
        if package == self._package:
            return
        if release(package) != release(self._package):
            raise RuntimeError(
                f"this strategy was made for {self._package} {release(self._package)}, its Trainer is of {package} "
                f"{release(package)}: install the same release of both, or import one of them only, before the strategy is made"
            )
        self.__class__ = _concrete(_abstract(type(self)), package)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (_abstract(type(self)), self._package), self.__dict__


@functools.cache
def _concrete(cls: type[EitherStrategy], package: str) -> type[Any]:
    """Return a subclass with the package's own `DDPStrategy` behind it."""
    base = submodule(package, "strategies").DDPStrategy
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "_package": package}
    concrete: type[Any] = type(base)(cls.__name__, (cls, base), names)
    return concrete


def _abstract(concrete: type[EitherStrategy]) -> type[EitherStrategy]:
    """Return the class from which `_concrete` was derived."""
    return concrete.__bases__[0]


def _rebuilt(cls: type[EitherStrategy], package: str) -> EitherStrategy:
    """Return an unpickled instance, still without its attributes."""
    concrete: type[EitherStrategy] = _concrete(cls, package)
    return concrete.__new__(concrete)


# Trainers, and the command line that Lightning makes of them, check whether this is one of their own strategies.
on_import(lambda package: submodule(package, "strategies").DDPStrategy.register(EitherStrategy))
