#!/bin/sh
# Stands in for `weir` in tests.rs: prints its arguments, reports ready, and exits with 0 on SIGTERM.
if [ -n "$COMPLAINT" ]; then
  echo "$COMPLAINT" >&2
  exit 2
fi
trap 'echo goodbye; exit 0' TERM
echo "arguments $*"
echo "greeting $GREETING, inherited ${WEIR_TEST_SKIP:-none}" >&2
mkdir -p "$WEIR_DATA"
echo secret > "$WEIR_DATA/admin.key"
echo "{\"message\":\"weir ready\",\"url\":\"http://$WEIR_LISTEN\"}"
while :; do sleep 0.02; done
