#!/bin/sh
# What the tests of other machines need and pip does not bring: an SSH server, and Slurm with munge. The tests start
# them by themselves, on the loopback and with files of their own; here no service is started, or enabled for later.
# Debian and Ubuntu; as root, or with sudo. Does nothing where all are there.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
needed=""
command -v sshd >/dev/null && command -v ssh >/dev/null || needed="openssh-server openssh-client"
for pair in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge; do
    command -v "${pair%%:*}" >/dev/null || needed="$needed ${pair##*:}"
done
needed=$(echo $needed)
[ -n "$needed" ] || exit 0

if [ "$(id -u)" = 0 ]; then as_root=""
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then as_root="sudo -n"
else as_root="none"
fi
if ! command -v apt-get >/dev/null || [ "$as_root" = none ]; then
    echo "the tests of other machines need: $needed; as root: apt-get install $needed" >&2
    exit 2
fi
echo "== installing for the tests of other machines: $needed"
policy=/usr/sbin/policy-rc.d                 # while it says 101, an installation starts no service
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | $as_root tee "$policy" >/dev/null
    $as_root chmod 755 "$policy"
    trap '$as_root rm -f "$policy"' EXIT
fi
# shellcheck disable=SC2086 - several words on purpose
$as_root apt-get -o DPkg::Lock::Timeout=600 update -qq &&
    DEBIAN_FRONTEND=noninteractive $as_root apt-get -o DPkg::Lock::Timeout=600 install -qq -y --no-install-recommends $needed >/dev/null
for package in $needed; do
    case $package in
        openssh-server) unit=ssh ;;
        slurmctld | slurmd | munge) unit=$package ;;
        *) continue ;;
    esac
    command -v systemctl >/dev/null && $as_root systemctl --quiet disable "$unit" 2>/dev/null || true
done
