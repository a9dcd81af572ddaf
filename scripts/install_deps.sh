#!/usr/bin/env bash
# Installs the Debian packages that Cistron needs. Asks nothing; done at once when all are there.
#
#   scripts/install_deps.sh               what the program needs to be built
#   scripts/install_deps.sh --test        and what the tests need, Open MPI among it (optional for a build)
#   scripts/install_deps.sh --developer   and clang, clang-tidy, clang-format, sanitizer runtimes
#
# Runs as root, or through sudo where that needs no password. Where it may not install, it prints the exact
# apt-get line and stops with status 1.
set -euo pipefail

build=(g++ cmake ninja-build pkg-config make
       libdnnl-dev libhwy-dev libhts-dev libyaml-cpp-dev nlohmann-json3-dev libcli11-dev libspdlog-dev
       libfmt-dev libxxhash-dev zlib1g-dev)
test=(libgtest-dev libgmock-dev libbenchmark-dev python3 python3-venv git libopenmpi-dev openmpi-bin)
developer=(clang clang-tidy clang-format libclang-rt-14-dev libomp-dev llvm ccache)

packages=("${build[@]}")
case "${1:-}" in
  "") ;;
  --test) packages+=("${test[@]}") ;;
  --developer) packages+=("${test[@]}" "${developer[@]}") ;;
  *) echo "install_deps: unknown option $1 (known: --test, --developer)" >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "install_deps: this is no Debian system. Install the equivalents of:" >&2
  echo "  ${packages[*]}" >&2
  echo "and set CISTRON_SKIP_DEPS=1." >&2
  [[ -n "${CISTRON_SKIP_DEPS:-}" ]] && exit 0
  exit 1
fi

missing=()
installed=$(dpkg-query -W -f='${Package} ${Provides} ${db:Status-Status}\n' 2>/dev/null | grep ' installed$' | tr ' ,' '\n\n' || true)
for p in "${packages[@]}"; do
  grep -qxF "$p" <<<"$installed" || missing+=("$p")
done
if [[ ${#missing[@]} -eq 0 ]]; then
  echo "install_deps: all packages are installed"
  exit 0
fi
if [[ -n "${CISTRON_SKIP_DEPS:-}" ]]; then
  echo "install_deps: not installed, left alone because of CISTRON_SKIP_DEPS: ${missing[*]}"
  exit 0
fi

if [[ $(id -u) -eq 0 ]]; then
  prefix=()
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
  prefix=(sudo -n)
else
  echo "install_deps: packages are missing, and neither root nor sudo without a password is at hand. Run:" >&2
  echo >&2
  echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
  echo >&2
  echo "then repeat your command." >&2
  exit 1
fi

echo "install_deps: installing ${missing[*]}"
run() { "${prefix[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=120 "$@" </dev/null; }
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { run update && run install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
  tail -20 "$log" >&2
  echo "install_deps: apt-get failed. What was tried:" >&2
  echo "  apt-get update && apt-get install -y --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
echo "install_deps: done"
