#!/usr/bin/env bash
# Print the path of a Python of the given version (such as 3.12): from PATH, else from pyenv, else fail with a message.
set -u
version=$1
for candidate in "python$version" "$(pyenv root 2>/dev/null)"/versions/"$version".*/bin/python; do
  if path=$("$candidate" -c 'import sys; print(sys.executable)' 2>/dev/null); then
    echo "$path"
    exit 0
  fi
done
echo "find_python.sh: Python $version is missing: put python$version on PATH or install it with pyenv" >&2
exit 1
