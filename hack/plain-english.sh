#!/usr/bin/env bash
# How plain the pages are: words a sentence on average, words of the longest sentence, phrases that CONTRIBUTING.md rules out, and
# characters of the longest table cell. The average is that of prose; longest sentence and phrases are those of table cells and
# headings too. Code does not count, but in the length of a cell, in which targets of links do not.
#
#   plain-english.sh [--long] [FILE...]
#
# A page that misses the rules is an error. --long prints each sentence and cell that does. Without files it reads all pages.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=
[ "${1-}" != --long ] || { mode=--long && shift; }
[ $# -gt 0 ] || set -- README.md ARCHITECTURE.md CONTRIBUTING.md SECURITY.md CHANGELOG.md docs/*.md deploy/*.md crates/*/README.md crates/*/*/README.md
measured=$(mktemp)
trap 'rm -f "$measured"' EXIT

awk -v mode="$mode" '
    BEGIN {
        split("stands before|by way of|goes|go on|going on|in work|anew|vouches|is believed|is told|are told|is no|are no|is none|so many times as|is away|are away|made twice|beside|nobody", phrases, "|")
    }
    function sentence(text, prose,    words, count, plain, i, from) {
        count = split(text, words, /[ \t]+/)
        if (count == 0) return
        if (prose) { sentences++; total += count }
        if (count > longest) longest = count
        if (count > 35 && mode == "--long") print page ": " count " words: " text > "/dev/stderr"
        plain = tolower(" " text " ")
        gsub(/[^a-z]+/, " ", plain)
        for (i in phrases) {
            from = plain
            while ((at = index(from, " " phrases[i] " ")) > 0) {
                found++
                from = substr(from, at + length(phrases[i]) + 1)
                if (mode == "--long") print page ": \"" phrases[i] "\": " text > "/dev/stderr"
            }
        }
    }
    function block(text, prose,    parts, count, i) {
        gsub(/`[^`]*`/, "CODE", text)
        gsub(/(CODE, )+CODE/, "CODE", text)
        gsub(/\]\([^)]*\)/, "", text)
        gsub(/[\[*]/, "", text)
        gsub(/[.?!]["")]* +/, "&\n", text)
        count = split(text, parts, "\n")
        for (i = 1; i <= count; i++) {
            gsub(/^ +| +$/, "", parts[i])
            if (parts[i] ~ /[A-Za-z]/) sentence(parts[i], prose)
        }
    }
    function cell(text) {
        gsub(/\]\([^)]*\)/, "", text)
        gsub(/\[/, "", text)
        gsub(/^ +| +$/, "", text)
        if (length(text) > widest) widest = length(text)
        if (length(text) > 160 && mode == "--long") print page ": " length(text) " characters: " text > "/dev/stderr"
    }
    function flush() { block(paragraph, 1); paragraph = "" }
    function finish() {
        flush()
        if (page != "") printf "%s %.1f %d %d %d\n", page, sentences ? total / sentences : 0, longest, found, widest
        sentences = total = longest = found = widest = fenced = 0
    }
    FNR == 1 { finish(); page = FILENAME }
    /^ *```/ { flush(); fenced = !fenced; next }
    fenced { next }
    /^ *$/ { flush(); next }
    /^#/ { flush(); block($0, 0); next }
    /^ *\|/ {
        flush()
        count = split($0, cells, "|")
        for (c = 1; c <= count; c++) { block(cells[c], 0); cell(cells[c]) }
        next
    }
    /^ *([-*]|[0-9]+\.) / { flush(); sub(/^ *([-*]|[0-9]+\.) /, "") }
    { paragraph = paragraph " " $0 }
    END { finish() }
' "$@" >"$measured"

awk '
    NR == 1 { printf "%-50s %7s %7s %7s %7s\n", "page", "average", "longest", "phrases", "cell" }
    {
        bad = $2 > 16 || $3 > 35 || $4 > 0 || $5 > 160
        printf "%-50s %7s %7s %7s %7s%s\n", $1, $2, $3, $4, $5, bad ? "  misses the rules" : ""
        failed = failed || bad
    }
    END { exit failed }
' "$measured" || { echo "plain-english: hack/plain-english.sh --long prints the sentences; CONTRIBUTING.md has the rules" >&2; exit 1; }
