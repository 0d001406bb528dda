#!/usr/bin/env bash
# Compiles our own packages (.cargo/config.toml). In builds for tests, programs and libraries are optimised a little, since the tests
# wait for them. The test programs are not: that takes longer than what they save. Cargo has no profile for them alone.
# In bash, since other shells drop variables such as CARGO_BIN_EXE_cbt-lab.
rustc=$1
shift
case " $* " in
    *" --test "*" opt-level=1 "* | *" opt-level=1 "*" --test "*) exec "$rustc" "$@" -C opt-level=0 ;;
esac
exec "$rustc" "$@"
