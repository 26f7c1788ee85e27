// SPDX-License-Identifier: Apache-2.0
// Finds error messages that are pasted whole into the search. Sphinx shows pages with all
// words only, and a message has names and numbers of the reader's own. For eight words
// and more, pages with most of them are shown, and the page on errors before its equals.
"use strict";
const findMessages = () => {
  const findAll = Search.performTermsSearch;
  Search.performTermsSearch = (terms, excluded) => {
    if (terms.size < 8) return findAll(terms, excluded);
    const pages = new Map();
    for (const term of terms) {
      for (const result of findAll(new Set([term]), excluded)) {
        const [, count] = pages.get(result[0]) ?? [result, 0];
        pages.set(result[0], [result, count + 1]);
      }
    }
    pages.delete("changelog"); // it has nearly all words
    const ranked = [];
    for (const [page, [result, count]] of pages) {
      const score = count + (page === "reference/errors" ? 3 : 0);
      if (count >= 0.7 * terms.size) ranked.push([score, result]);
    }
    ranked.sort((one, other) => other[0] - one[0]);
    return ranked.slice(0, 10).map(([score, result]) => {
      const [name, title, anchor, text, , ...rest] = result;
      return [name, title, anchor, text, Scorer.title + score, ...rest];
    });
  };
};
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search !== "undefined") findMessages(); // on the page of results
});
