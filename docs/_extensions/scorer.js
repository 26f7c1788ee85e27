// SPDX-License-Identifier: Apache-2.0
// How the site's search ranks results: first the pages that conf.py's extension
// `keywords` names for the whole query, then exact names, then pages with the words in
// their titles, of which the short answers of docs/questions/ come first. Entries of the
// emulator and of methods come after those of ipufit's classes and functions. The other
// numbers are Sphinx's.
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    if (kind === "object") {
      const isBelow = title.split(".").length > 3 || title.includes(".emulator.");
      return isBelow ? score - 30 : score;
    }
    const isAnswer = docname.startsWith("questions/") && score >= Scorer.title;
    return isAnswer ? score + 20 : score;
  },
  objNameMatch: 40,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
