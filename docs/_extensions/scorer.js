// SPDX-License-Identifier: Apache-2.0
// How the site's search ranks results. A page of docs/questions/ is short and answers one
// question: where it has all the words, it comes first. A name comes before both. The
// other numbers are Sphinx's.
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) =>
    docname.startsWith("questions/") && kind !== "object" ? score + 20 : score,
  objNameMatch: 40,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
