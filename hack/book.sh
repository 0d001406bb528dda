#!/usr/bin/env bash
# All pages as one book with search: target/book/index.html. Builds mdBook into a cache outside the tree the first time,
# in a few minutes.
# Fails if docs/SUMMARY.md lacks a page, or if a link of the book leads nowhere.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

mdbook=$(hack/cargo-tool.sh mdbook 0.5.4 --debug --no-default-features --features search)

# In the book the pages of the root are beside those of docs. A link to anything else is words alone there.
pages=(README.md ARCHITECTURE.md CONTRIBUTING.md SECURITY.md CHANGELOG.md)
source=target/book-source
rm -rf "$source" target/book
mkdir -p "$source"
cp -r docs "$source/src"
cp "${pages[@]}" "$source/src"
names=$(IFS='|' && echo "${pages[*]//./\\.}")
sed -zEi "s#\]\(\.\./($names)#](\1#g; s#\]\(docs/#](#g; s#\[([^][]*)\]\((\.\./|crates/|deploy/|proto/|LICENSE)[^)]*\)#\1#g; s#\]\(README\.md#](index.md#g" \
    "$source"/src/*.md
mv "$source/src/README.md" "$source/src/index.md"
cat >"$source/book.toml" <<T
[book]
title = "deltapath"
[build]
build-dir = "$root/target/book"
[output.html]
no-section-label = true
T
for page in "$source"/src/*.md; do
    page=${page##*/}
    [ "$page" = SUMMARY.md ] || grep -qF "]($page)" "$source/src/SUMMARY.md" || { echo "book: docs/SUMMARY.md lacks $page" >&2 && exit 1; }
done
"$mdbook" build "$source"

cd target/book
failed=no
while IFS=: read -r page link; do
    target=${link%%#*}
    target=${target:-$page}
    if ! [ -e "$target" ]; then
        echo "book: $page links to $link, which is not there" >&2 && failed=yes
    elif [[ $link = *#?* ]] && ! grep -qF "id=\"${link#*#}\"" "$target"; then
        echo "book: $page links to $link, and there is no such heading" >&2 && failed=yes
    fi
done < <(grep -oE '(href|src)="[^":]+"' -- *.html | sed -E 's/:(href|src)="/:/; s/"$//' | grep -v '^print\.html' | sort -u)
[ "$failed" = no ]
echo "book: target/book/index.html"
