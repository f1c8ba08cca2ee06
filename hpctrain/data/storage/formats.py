"""HDF5, Zarr and NetCDF; each needs its own package, which is loaded when it is used."""

from __future__ import annotations

from typing import Any

from hpctrain.data.storage.container import Container

__all__ = ["Hdf5", "NetCdf", "Zarr"]


class Hdf5(Container):
    """An HDF5 file; datasets in groups are named `group/dataset`."""

    package = "h5py"

    def _open(self, library: Any) -> Any:
        # No lock: many ranks read at once, and some parallel file systems have none.
        return library.File(self.path, "r", locking=False)

    def _arrays(self, handle: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def note(name: str, node: Any) -> None:
            if hasattr(node, "dtype") and node.shape is not None:
                found[name] = node

        handle.visititems(note)
        return found


class Zarr(Container):
    """A Zarr group or array in a folder."""

    package = "zarr"

    def _open(self, library: Any) -> Any:
        return library.open(store=str(self.path), mode="r")

    def _arrays(self, handle: Any) -> dict[str, Any]:
        if hasattr(handle, "shape"):
            return {"data": handle}
        # Zarr finds them side by side, in an order that differs from one process to the next.
        return dict(sorted(handle.arrays()))


class NetCdf(Container):
    """A NetCDF file; values come as they are stored, without masks, scales or calendars."""

    package = "netCDF4"

    def _open(self, library: Any) -> Any:
        handle = library.Dataset(str(self.path), "r")
        handle.set_auto_maskandscale(False)
        return handle

    def _arrays(self, handle: Any) -> dict[str, Any]:
        return dict(handle.variables)
