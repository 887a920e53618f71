#!/usr/bin/env bash
# Build the CPU image and run it where there is no docker engine: as root, on Debian, with buildah and debootstrap.
#
#   apt-get install debootstrap buildah
#   tests/docker/without_engine.sh build FOLDER [more options of `buildah bud`, such as -v mounts for pip's settings]
#   tests/docker/without_engine.sh run FOLDER [COMMAND AND ARGUMENTS; by default the image's own]
#
# The base is a stand-in: debootstrap's minimal Debian 12, committed under the base image's name. FOLDER keeps the
# stand-in and the images; nothing else on the machine changes.
set -euo pipefail

BASE=docker.io/library/debian:12.12-slim
IMAGE=localhost/twinpane:cpu
PROJECT=$(cd "$(dirname "$0")/../.." && pwd)

action=${1:?build or run, then a folder for the images}
folder=$(realpath -m "${2:?a folder for the images}")
shift 2
mkdir -p "$folder"
tool() { buildah --root "$folder/storage" --runroot "$folder/run" --storage-driver vfs "$@"; }

stand_in_for_base() {
  tool inspect --type image "$BASE" >/dev/null 2>&1 && return
  [ -d "$folder/base" ] || debootstrap --variant=minbase bookworm "$folder/base"
  local container
  container=$(tool from scratch)
  tool copy -q "$container" "$folder/base" /
  tool config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --cmd bash "$container"
  tool commit -q --format docker "$container" "$BASE"
  tool rm "$container" >/dev/null
}

case $action in
  build)
    stand_in_for_base
    tool bud --isolation chroot --network host --format docker --pull-never \
      --build-arg "BASE=$BASE" --build-arg EXTRAS= "$@" --tag "$IMAGE" "$PROJECT"
    ;;
  run)
    container=$(tool from --pull-never "$IMAGE")
    trap 'tool rm "$container" >/dev/null' EXIT
    if [ $# -eq 0 ]; then
      # What an engine would run: the entrypoint and the default command, read from the image.
      mapfile -t words < <(tool inspect --type image --format \
        '{{range .Docker.Config.Entrypoint}}{{println .}}{{end}}{{range .Docker.Config.Cmd}}{{println .}}{{end}}' "$IMAGE")
      set -- "${words[@]}"
    fi
    tool run --isolation chroot --network host "$container" -- "$@"
    ;;
  *)
    echo "build or run, not $action" >&2
    exit 2
    ;;
esac
