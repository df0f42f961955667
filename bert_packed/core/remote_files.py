"""Files behind URLs such as gs://, s3://, hdfs:// or hf://, the Hugging Face hub, through `fsspec`.

It is imported at the first one, and asks for the package of its store where that is missing.
"""

import contextlib
import functools
import io
import sys

from bert_packed.core import hub
from bert_packed.core.settings import InputError

OWN_RENAME = (("file", "local"), "hdfs")  # `fsspec` renames by a copy elsewhere


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
        files, name = _files(path)
        try:
            return files.info(name)
        except (FileNotFoundError, NotADirectoryError):
            # On the hub a cause says that the data set itself is not to be had
            if hub.is_on_hub(path) and sys.exception().__cause__ is not None:
                raise
            return {}
        except ValueError:
            if hub.is_on_hub(path):  # two parts with a comma are no path there
                return {}
            raise


def ask(path, method, *arguments, **named):
    """Call a method of the file system of a URL with its path."""
    with _naming(path):
        files, name = _files(path)
        return getattr(files, method)(name, *arguments, **named)


def match(pattern):
    """The URLs that a glob names: list of str."""
    with _naming(pattern):
        files, name = _files(pattern)
        # Names come without the beginning, as "gs://" or "hdfs://host:8020"
        beginning = pattern.removesuffix(name)
        return [f"{beginning}{found}" for found in files.glob(name)]


def rename(source, target):
    """Give a file another name, replacing what has it."""
    with _naming(source):
        (files, old), (_, new) = _files(source), _files(target)
        if files.protocol in OWN_RENAME:
            files.mv(old, new)
        else:  # `mv` would take a name with brackets for a glob
            files.cp_file(old, new)
            files.rm_file(old)


def remove_folder(path):
    """Remove a folder with all that it holds."""
    with _naming(path):
        files, root = _files(path)
        found = files.find(root, withdirs=True, detail=True)
        folders = {root, *(name for name, entry in found.items() if entry["type"] == "directory")}
        for name in found.keys() - folders:
            files.rm_file(name)  # `rm` would take a name with brackets for a glob
        for name in sorted(folders, reverse=True):
            # Many stores have no folders but names of files
            with contextlib.suppress(OSError, NotImplementedError):
                files.rmdir(name)


def _files(path):
    """The file system of a URL, and the path in it. It keeps no lists of names, which others change."""
    import fsspec

    options = {} if hub.is_on_hub(path) else {"use_listings_cache": False}
    return fsspec.core.url_to_fs(str(path), **options)


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
