#!/bin/sh
# What the page's browser tests need and pip does not bring: Chromium, and a font with Chinese characters.
# Debian and Ubuntu; as root, or with sudo. Does nothing where both are there.
set -eu
needed=""
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null ||
    needed="chromium"
{ command -v fc-list >/dev/null && [ -n "$(fc-list :lang=zh-cn family)" ]; } || needed="$needed fontconfig fonts-noto-cjk"
[ -n "$needed" ] || exit 0

if [ "$(id -u)" = 0 ]; then as_root=""
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then as_root="sudo -n"
else as_root="none"
fi
if ! command -v apt-get >/dev/null || [ "$as_root" = none ]; then
    echo "the page's browser tests need:$(echo " $needed" | tr -s ' '); as root: apt-get install$(echo " $needed" | tr -s ' ')" >&2
    exit 2
fi
echo "== installing for the page's browser tests:$(echo " $needed" | tr -s ' ')"
# shellcheck disable=SC2086 - several words on purpose
$as_root apt-get -o DPkg::Lock::Timeout=600 update -qq &&
    DEBIAN_FRONTEND=noninteractive $as_root apt-get -o DPkg::Lock::Timeout=600 install -qq -y --no-install-recommends $needed >/dev/null
