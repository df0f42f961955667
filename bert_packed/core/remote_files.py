"""Files behind URLs such as gs://, s3://, hdfs:// or hf://, the Hugging Face hub, through `fsspec`.

It is imported at the first one, and asks for the package of its store where that is missing.
"""

import contextlib
import functools
import io

from bert_packed.core import hub
from bert_packed.core.settings import InputError


def open_file(path, mode):
    """Open a binary file: "rb" or "wb"; raises `OSError`."""
    if mode != "rb" and hub.is_on_hub(path):  # each file would be a commit
        raise OSError(f"{path} can only be read")
    file = ask(path, "open", mode)
    return io.BufferedReader(_Ranges(file, path)) if mode == "rb" else _Written(file, path)


def info(path):
    """What a store says of a path: dict, {} where there is none.

    `exists` of `fsspec` would be False for whatever goes wrong.
    """
    with _naming(path):
        try:
            return _files(path).info(str(path))
        except (FileNotFoundError, ValueError) as error:
            # On the hub a cause says that the data set itself is not to be had; two parts with a comma are no
            # path there. Elsewhere a wrong value is a scheme that nobody knows
            is_missing = not hub.is_on_hub(path) or error.__cause__ is None
            if is_missing and (hub.is_on_hub(path) or isinstance(error, FileNotFoundError)):
                return {}
            raise


def ask(path, method, *arguments, **named):
    """Call a method of the file system of a URL with the URL."""
    with _naming(path):
        return getattr(_files(path), method)(str(path), *arguments, **named)


def _files(path):
    """The file system of a URL. It keeps no lists of names, which other processes change."""
    import fsspec

    options = {} if hub.is_on_hub(path) else {"use_listings_cache": False}
    return fsspec.core.url_to_fs(str(path), **options)[0]


@contextlib.contextmanager
def _naming(path):
    """Let what goes wrong with a URL be an `OSError` that names it, or an `InputError` for people to mend."""
    if hub.is_on_hub(path):
        with hub.asking(hub.DATA_RULE, path):
            yield
        return
    try:
        yield
    except OSError:
        raise
    except ImportError as error:
        raise InputError(f"{path} needs another package. Received: {error}.") from error
    # Each store's package raises its own kinds, and `fsspec` a ValueError for schemes that it does not know
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise OSError(f"{path}: {lines[0]}") from error


class _Ranges(io.RawIOBase):
    """A remote file to read, whose errors name it."""

    def __init__(self, file, path):
        self._file, self._path = file, path

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        return self._file.seek(offset, whence)

    def tell(self):
        return self._file.tell()

    def readinto(self, buffer):
        with _naming(self._path):
            content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def close(self):
        self._file.close()
        super().close()


class _Written:
    """A remote file to write, whose errors name it."""

    def __init__(self, file, path):
        self._file, self._path = file, path

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __getattr__(self, name):
        return functools.partial(self._call, name)

    def _call(self, name, *arguments):
        with _naming(self._path):
            return getattr(self._file, name)(*arguments)
